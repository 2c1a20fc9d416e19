//! One GPU: a context, one stream, kernels by name.

mod launch;
mod memory;
mod streams;

pub use launch::{Arg, Kernel, Launch};
pub use memory::{Buffer, Pinned, Plain};
pub(crate) use streams::Mark;
pub use streams::{Copies, Graph};

use crate::{detect, images};
use cudarc::driver::sys;
use launch::kept;
use quantspec_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::{fmt, ptr};

/// Shared-memory carve-out of GEMMs that load into registers, in percent of an SM's memory: enough for their blocks' sums.
/// The rest is L1, where loads wait for memory. Without this they inherit attention's carve-out, nearly all, and run at three
/// quarters of the speed.
pub(crate) const LOADS_PERCENT: i32 = 30;
/// Carve-out of small kernels between GEMMs with pipelines in shared memory: all, so that an SM's split stays constant within
/// a step.
const PIPELINES_PERCENT: i32 = 100;

/// A GPU with the crate's kernels loaded. Work is queued on one stream, in order.
#[derive(Debug)]
pub struct Device {
    context: sys::CUcontext,
    handle: sys::CUdevice,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    queued: Mutex<Queued>,
    /// Launches are being recorded into a graph.
    recording: AtomicBool,
    /// The driver cannot record overlapping kernels, so those of graphs do not overlap.
    apart: AtomicBool,
    /// Waits after every launch and records no rounds, so that an error names its kernel: `CUDA_LAUNCH_BLOCKING=1`, as in
    /// other CUDA programs.
    pub(crate) one_by_one: bool,
    /// Name and compute capability.
    pub info: detect::DeviceInfo,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Shared memory of an SM, in bytes.
    pub shared_per_sm: usize,
}

// SAFETY: driver handles may be used from any thread; every call binds the context to its thread first.
unsafe impl Send for Device {}
// SAFETY: see above; the driver serialises calls on a stream.
unsafe impl Sync for Device {}

/// Hint for an error of queued work, whose kernel is unknown.
const NAMED: &str = "check nvidia-smi and the kernel log (dmesg), or use --device cpu; run again with CUDA_LAUNCH_BLOCKING=1 in the environment to see which kernel failed";

/// A grid for messages: "x × y × z".
fn blocks([x, y, z]: [u32; 3]) -> String {
    format!("{x} × {y} × {z}")
}

/// The last queued work, for errors that appear only after the GPU has run it: a kernel and its grid, or a recorded round.
#[derive(Clone, Copy, Debug)]
enum Queued {
    Nothing,
    Kernel(&'static str, [u32; 3]),
    Graph,
}

impl fmt::Display for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Queued::Nothing => write!(f, "nothing queued"),
            Queued::Kernel(name, grid) => write!(f, "kernel {name} of {} blocks queued last", blocks(*grid)),
            Queued::Graph => write!(f, "recorded steps queued last"),
        }
    }
}

/// Turns a status into an error that names the call.
fn check(status: sys::CUresult, what: &str) -> Result<()> {
    check_with(status, || what.to_owned())
}

/// As [`check`], with text built only on failure.
fn check_with(status: sys::CUresult, what: impl FnOnce() -> String) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let what = what();
    let mut text = ptr::null();
    // SAFETY: cuGetErrorName stores a pointer to a static string, or null.
    let name = unsafe {
        let _ = sys::cuGetErrorName(status, &mut text);
        if text.is_null() { format!("{status:?}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(Error::does_not_fit(
            format!("{what}: the GPU is out of memory"),
            "use a smaller context (-c), fewer sequences at once, or free the GPU's memory (nvidia-smi shows who holds it)",
        ));
    }
    let hint = match status {
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "libcuda.so is the toolkit's stub: take its directory out of LD_LIBRARY_PATH, or use --device cpu"
        }
        sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another program has the GPU to itself: wait for it, or use another (--device cuda:1) or --device cpu"
        }
        _ => "check nvidia-smi and the kernel log (dmesg), or use --device cpu",
    };
    Err(Error::device(format!("{what}: {name}"), hint))
}

impl Device {
    /// Opens device `index` and loads every kernel.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the driver has no such device, [`quantspec_core::ErrorKind::Device`] for an
    /// absent or old driver, a GPU too old, a library without kernels and failed calls.
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if the GPU is out of memory, [`quantspec_core::ErrorKind::Internal`] if an
    /// image is damaged or missing.
    pub fn open(index: usize) -> Result<Arc<Device>> {
        Device::open_as(index, false)
    }

    /// As [`Device::open`], from the PTX images, which run on GPUs newer than this library. For tests of those images.
    ///
    /// # Errors
    /// As [`Device::open`]. Below compute capability 8.0 the driver refuses the images, which is a device error.
    pub fn open_ptx(index: usize) -> Result<Arc<Device>> {
        Device::open_as(index, true)
    }

    fn open_as(index: usize, portable: bool) -> Result<Arc<Device>> {
        let mut info = detect::device(index)?;
        if portable {
            info.architecture = images::PTX;
        }
        let ordinal =
            i32::try_from(index).map_err(|_| Error::internal(format!("device index {index} after detection")))?;
        let mut device = Device {
            context: ptr::null_mut(),
            handle: 0,
            stream: ptr::null_mut(),
            modules: Vec::new(),
            queued: Mutex::new(Queued::Nothing),
            recording: AtomicBool::new(false),
            apart: AtomicBool::new(false),
            one_by_one: std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value == "1"),
            info,
            shared_bytes: 0,
            shared_per_sm: 0,
        };
        // SAFETY: detection has opened the driver's library and found it new enough for every symbol used here. Handles are
        // stored in `device` as soon as they exist, so that its Drop releases them also on an early return.
        unsafe {
            check(sys::cuInit(0), "cuInit")?;
            check(sys::cuDeviceGet(&mut device.handle, ordinal), "cuDeviceGet")?;
            check(sys::cuDevicePrimaryCtxRetain(&mut device.context, device.handle), "opening the GPU")?;
            device.bind()?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check(sys::cuStreamCreate(&mut device.stream, flags), "cuStreamCreate")?;
            device.shared_per_sm =
                device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
            device.shared_bytes =
                device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        }
        for stem in images::stems() {
            let image = if portable { images::portable(stem) } else { images::choose(stem, device.info.capability) }
                .ok_or_else(|| Error::internal(format!("no image of {stem} for {}", device.info.compute_capability)))?;
            let bytes = image.inflate()?;
            let mut module = ptr::null_mut();
            // SAFETY: `bytes` is machine code or NUL-terminated PTX; the driver copies it.
            check(unsafe { sys::cuModuleLoadData(&mut module, bytes.as_ptr().cast()) }, &format!("loading {stem}"))?;
            device.modules.push(module);
        }
        Ok(Arc::new(device))
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<usize> {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.handle) }, "cuDeviceGetAttribute")?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// Makes the context current in this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` outlives the call; the context is retained while `self` lives. Checked on every call (a read of
        // thread-local memory): another library in this thread may have set its own context.
        unsafe {
            check(sys::cuCtxGetCurrent(&mut current), "cuCtxGetCurrent")?;
            if current != self.context {
                check(sys::cuCtxSetCurrent(self.context), "cuCtxSetCurrent")?;
            }
        }
        Ok(())
    }

    /// The kernel `name` (extern "C" in kernels/). `shared` is the largest dynamic shared memory of its launches, in bytes.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if no image has a kernel of that name. Device errors of the driver, such as
    /// for more shared memory than a block may have.
    pub fn kernel(&self, name: &str, shared: usize) -> Result<Kernel> {
        self.bind()?;
        let symbol = CString::new(name).map_err(|_| Error::internal(format!("kernel name {name:?} holds a NUL")))?;
        for &module in &self.modules {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded and the name NUL-terminated.
            if unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) }
                == sys::CUresult::CUDA_SUCCESS
            {
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // Dynamic shared memory available by default: 48 KiB minus the kernel's static arrays.
                let mut unasked = 0;
                // SAFETY: `unasked` outlives the call, and `function` was just found.
                check(unsafe { sys::cuFuncGetAttribute(&mut unasked, attribute, function) }, "cuFuncGetAttribute")?;
                if shared > usize::try_from(unasked).unwrap_or(0) {
                    // SAFETY: as above.
                    let status = unsafe { sys::cuFuncSetAttribute(function, attribute, shared as i32) };
                    check(status, &format!("{name} with {shared} bytes of shared memory"))?;
                }
                let kernel = Kernel { function, name: kept(name) };
                if shared == 0 {
                    self.prefer_shared(kernel, if self.has_tma() { PIPELINES_PERCENT } else { LOADS_PERCENT })?;
                }
                return Ok(kernel);
            }
        }
        Err(Error::internal(format!("no kernel {name} for compute capability {}", self.info.compute_capability)))
    }

    /// True if kernels use TMA.
    pub(crate) fn has_tma(&self) -> bool {
        images::has_tma(self.info.architecture)
    }

    /// Sets the kernel's preferred shared-memory carve-out to `percent` of an SM's memory.
    pub(crate) fn prefer_shared(&self, kernel: Kernel, percent: i32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: kernels live as long as their module, which is the device's.
        check(unsafe { sys::cuFuncSetAttribute(kernel.function, attribute, percent) }, "preferring shared memory")
    }

    /// Queues a kernel.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for more than 40 arguments. Device errors of the driver, named by kernel, grid
    /// and shared memory. An error while the kernel runs is reported by a later call, at the latest by the next wait.
    ///
    /// # Safety
    /// `arguments` must match the kernel's parameters in number and type, and every address must stay valid for the kernel's
    /// accesses until the stream has completed it.
    pub unsafe fn launch(&self, kernel: Kernel, launch: Launch, arguments: &[Arg]) -> Result<()> {
        self.bind()?;
        // CUDA hosts are little endian, so a four-byte value is at the start of its eight bytes.
        let mut values = [0u64; 40];
        let mut pointers = [ptr::null_mut::<c_void>(); 40];
        if arguments.len() > values.len() {
            return Err(Error::internal(format!(
                "a kernel with {} arguments; up to {} are passed",
                arguments.len(),
                values.len()
            )));
        }
        for (index, argument) in arguments.iter().enumerate() {
            values[index] = match *argument {
                Arg::Long(value) => value,
                Arg::Int(value) => u64::from(value as u32),
                Arg::Float(value) => u64::from(value.to_bits()),
                Arg::Bytes(_) => 0,
            };
        }
        for (index, argument) in arguments.iter().enumerate() {
            pointers[index] = match *argument {
                Arg::Bytes(bytes) => bytes.as_ptr().cast_mut().cast(),
                _ => ptr::from_mut(&mut values[index]).cast(),
            };
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let alone = self.recording.load(Ordering::Relaxed) && self.apart.load(Ordering::Relaxed);
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: self.stream,
            attrs: &mut attribute,
            // Code for older GPUs, including PTX, does not wait for the previous kernel itself.
            numAttrs: u32::from(launch.overlap && self.info.architecture >= 90 && !alone),
        };
        // SAFETY: the caller guarantees the arguments; the driver copies them before it returns.
        let status = unsafe { sys::cuLaunchKernelEx(&config, kernel.function, pointers.as_mut_ptr(), ptr::null_mut()) };
        self.note(Queued::Kernel(kernel.name, launch.grid));
        check_with(status, || {
            let Launch { grid, block, shared, .. } = launch;
            format!(
                "launching {} with {} blocks of {block} threads, {shared} bytes of shared memory",
                kernel.name,
                blocks(grid)
            )
        })?;
        if self.one_by_one && !self.recording.load(Ordering::Relaxed) {
            // SAFETY: the stream lives as long as `self`.
            let status = unsafe { sys::cuStreamSynchronize(self.stream) };
            check_with(status, || format!("kernel {} of {} blocks failed", kernel.name, blocks(launch.grid)))?;
        }
        Ok(())
    }

    /// Converts the status of a wait. Any work queued before it may have failed; only a wait after every launch shows which.
    fn waited(&self, status: sys::CUresult) -> Result<()> {
        let waiting =
            || format!("waiting for the GPU, {}", self.queued.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        check_with(status, waiting).map_err(|error| match error.kind {
            ErrorKind::Device if !self.one_by_one => Error::device(error.message, NAMED),
            _ => error,
        })
    }

    fn note(&self, queued: Queued) {
        *self.queued.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = queued;
    }

    /// Device memory of `bytes` bytes (at least one), uninitialised.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] with the requested, free and total bytes. Other device errors of the driver.
    pub fn allocate(self: &Arc<Device>, bytes: usize) -> Result<Buffer> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        let status = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        // A size beyond any address space may be reported as invalid instead of too large.
        if matches!(status, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_INVALID_VALUE) {
            let (free, total) = self.memory()?;
            return Err(Error::new(
                ErrorKind::DoesNotFit,
                format!("{bytes} bytes more do not fit on {}: {free} of {total} bytes are free", self.info.name),
                "use a smaller context (-c), fewer sequences at once, or free the GPU's memory (nvidia-smi shows who holds it)",
            ));
        }
        check(status, "allocating device memory")?;
        Ok(Buffer { device: self.clone(), address, bytes })
    }

    /// Device memory set to zero.
    ///
    /// # Errors
    /// Those of [`Device::allocate`] and [`Buffer::fill`].
    pub fn zeroed(self: &Arc<Device>, bytes: usize) -> Result<Buffer> {
        let buffer = self.allocate(bytes)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// Device memory with a copy of `values`.
    ///
    /// # Errors
    /// Those of [`Device::allocate`] and [`Buffer::write`].
    pub fn copied<T: Plain>(self: &Arc<Device>, values: &[T]) -> Result<Buffer> {
        let buffer = self.allocate(size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// (free, total) bytes of device memory.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both outlive the call.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Zeroed page-locked host memory of `bytes` bytes, which the device copies directly.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if no more memory can be locked. Other device errors of the driver.
    pub fn pinned(self: &Arc<Device>, bytes: usize) -> Result<Pinned> {
        self.bind()?;
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` outlives the call.
        let status = unsafe { sys::cuMemHostAlloc(&mut pointer, bytes.max(1), 0) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::does_not_fit(
                format!("{bytes} bytes of host memory cannot be page-locked"),
                "free memory of this machine, or raise the limits of its container (memory, ulimit -l)",
            ));
        }
        check(status, "allocating page-locked memory")?;
        // SAFETY: the call succeeded, so the memory has `bytes` bytes.
        unsafe { ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        Ok(Pinned { device: self.clone(), pointer: pointer.cast(), bytes })
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// Device errors of the driver and of queued work, named by the work queued last.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        self.waited(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Returns true if all queued work is done.
    ///
    /// # Errors
    /// As [`Device::synchronize`].
    pub fn idle(&self) -> Result<bool> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => self.waited(status).map(|()| true),
        }
    }

    /// Records `work` into a graph instead of running it. Drivers before CUDA 12.3 refuse overlapping kernels in graphs;
    /// `work` is then recorded again without overlap.
    ///
    /// # Errors
    /// Those of `work`. Device errors of the driver while it records and builds, [`quantspec_core::ErrorKind::DoesNotFit`] if
    /// memory runs out.
    pub fn record(self: &Arc<Device>, mut work: impl FnMut() -> Result<()>) -> Result<Graph> {
        match self.record_once(&mut work) {
            Err(error) if error.kind == ErrorKind::Device && !self.apart.swap(true, Ordering::Relaxed) => {
                let again = self.record_once(&mut work);
                self.apart.store(again.is_ok(), Ordering::Relaxed);
                again
            }
            recorded => recorded,
        }
    }

    fn record_once(self: &Arc<Device>, work: &mut dyn FnMut() -> Result<()>) -> Result<Graph> {
        self.bind()?;
        let mut graph = ptr::null_mut();
        let mut exec = ptr::null_mut();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: capture is ended and the graph destroyed on every path.
        unsafe {
            check(sys::cuStreamBeginCapture_v2(self.stream, mode), "recording a graph")?;
            self.recording.store(true, Ordering::Relaxed);
            let result = work();
            self.recording.store(false, Ordering::Relaxed);
            let ended = check(sys::cuStreamEndCapture(self.stream, &mut graph), "recording a graph");
            let made = result
                .and(ended)
                .and_then(|()| check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "building a graph"));
            if !graph.is_null() {
                sys::cuGraphDestroy(graph);
            }
            made?;
        }
        Ok(Graph { device: self.clone(), exec })
    }

    /// Records an event at this point of the stream.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub(crate) fn mark(self: &Arc<Device>) -> Result<Mark> {
        self.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: the event is owned by the mark.
        unsafe {
            check(sys::cuEventCreate(&mut event, 0), "cuEventCreate")?;
            let mark = Mark { device: self.clone(), event };
            mark.set(false)?;
            Ok(mark)
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.context.is_null() || self.bind().is_err() {
            return;
        }
        // SAFETY: every buffer, graph and mark holds an Arc of the device, so nothing else uses these handles.
        unsafe {
            if !self.stream.is_null() {
                sys::cuStreamSynchronize(self.stream);
                sys::cuStreamDestroy_v2(self.stream);
            }
            for &module in &self.modules {
                sys::cuModuleUnload(module);
            }
            sys::cuDevicePrimaryCtxRelease_v2(self.handle);
        }
    }
}
