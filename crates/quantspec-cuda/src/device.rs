//! One GPU: a context, one stream, kernels by name, owned memory, graphs.

use crate::{detect, images};
use cudarc::driver::sys;
use quantspec_core::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
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
    /// Streaming multiprocessors (SMs).
    pub sms: usize,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Shared memory of an SM, in bytes.
    pub shared_per_sm: usize,
}

// SAFETY: driver handles may be used from any thread; every call binds the context to its thread first.
unsafe impl Send for Device {}
// SAFETY: see above; the driver serialises calls on a stream.
unsafe impl Sync for Device {}

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: sys::CUfunction,
    name: &'static str,
}

/// A copy of the name with static lifetime, so that [`Kernel`] can be `Copy`. Each of the few hundred names is leaked once.
fn kept(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match names.get(name) {
        Some(kept) => kept,
        None => {
            let kept: &'static str = Box::leak(name.into());
            names.insert(kept);
            kept
        }
    }
}

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

// SAFETY: a function handle is valid in every thread while its module is loaded, and modules live as long as the device.
unsafe impl Send for Kernel {}
// SAFETY: see above.
unsafe impl Sync for Kernel {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    /// Launch while the previous kernel still runs (programmatic dependent launch); the kernel waits itself (`grid_wait`).
    pub overlap: bool,
}

/// A kernel argument: a value of up to eight bytes, or a struct by reference.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A pointer or a 64-bit number.
    Long(u64),
    /// A 32-bit number.
    Int(i32),
    /// A 32-bit float.
    Float(f32),
    /// A struct passed by value, as bytes.
    Bytes(&'a [u8]),
}

impl<'a> Arg<'a> {
    /// A struct passed by value.
    pub fn of<T: Plain>(value: &'a T) -> Arg<'a> {
        // SAFETY: a plain type has only initialised bytes.
        Arg::Bytes(unsafe { std::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) })
    }
}

impl From<&Buffer> for Arg<'_> {
    fn from(buffer: &Buffer) -> Self {
        Arg::Long(buffer.address)
    }
}

impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Arg::Long(value)
    }
}

impl From<i32> for Arg<'_> {
    fn from(value: i32) -> Self {
        Arg::Int(value)
    }
}

impl From<usize> for Arg<'_> {
    /// A count, as a 32-bit kernel argument.
    fn from(value: usize) -> Self {
        debug_assert!(value <= i32::MAX as usize);
        Arg::Int(value as i32)
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Arg::Float(value)
    }
}

/// `args![a, b, ...]`: an array of [`Arg`].
#[macro_export]
macro_rules! args {
    ($($value:expr),* $(,)?) => { [$($crate::device::Arg::from($value)),*] };
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
    /// As [`Device::open`]. On a GPU older than 8.0 the driver refuses the images, which is a device error.
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
            sms: 0,
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
            device.sms = device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
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

    /// Converts the status of a wait. Any work queued before it may have failed; only waiting after every launch tells which.
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
                "use a smaller context (-c), fewer slots, or free the GPU's memory (nvidia-smi shows who holds it)",
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
    pub fn mark(self: &Arc<Device>) -> Result<Mark> {
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

/// Types for which any bit pattern is a value and that have no padding.
///
/// # Safety
/// Implement it for such types only.
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: numbers have no padding and no invalid patterns.
unsafe impl Plain for u8 {}
// SAFETY: see above.
unsafe impl Plain for i8 {}
// SAFETY: see above.
unsafe impl Plain for u16 {}
// SAFETY: see above.
unsafe impl Plain for u32 {}
// SAFETY: see above.
unsafe impl Plain for i32 {}
// SAFETY: see above.
unsafe impl Plain for u64 {}
// SAFETY: see above.
unsafe impl Plain for f32 {}
// SAFETY: see above.
unsafe impl Plain for f64 {}
// SAFETY: f16 is a transparent u16.
unsafe impl Plain for half::f16 {}
// SAFETY: bf16 is a transparent u16.
unsafe impl Plain for half::bf16 {}

/// Device memory.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Device address of byte `offset`.
    pub fn at(&self, offset: usize) -> u64 {
        debug_assert!(offset <= self.bytes);
        self.address + offset as u64
    }

    fn inside(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::internal(format!("{bytes} bytes at {offset} of a buffer of {}", self.bytes))),
        }
    }

    /// Queues setting every byte to `byte`.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the buffer has that many bytes.
        check(
            unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes, self.device.stream) },
            "clearing device memory",
        )
    }

    /// Queues setting `width` bytes in each of `rows` rows; the first row begins at byte `offset`, rows are `pitch` bytes
    /// apart.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the rows overlap or reach beyond the buffer. Device errors of the driver,
    /// named by the call.
    pub fn fill_rows(&self, byte: u8, offset: usize, width: usize, pitch: usize, rows: usize) -> Result<()> {
        if width > pitch {
            return Err(Error::internal(format!("rows of {width} bytes every {pitch}")));
        }
        let reach = rows.saturating_sub(1).checked_mul(pitch).and_then(|all| all.checked_add(width));
        self.inside(offset, reach.unwrap_or(usize::MAX))?;
        self.device.bind()?;
        // SAFETY: the rows were checked.
        check(
            unsafe { sys::cuMemsetD2D8Async(self.at(offset), pitch, byte, width, rows, self.device.stream) },
            "clearing device memory",
        )
    }

    /// Copies `values` to byte `offset` after all queued work, and waits.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the values reach beyond the buffer. Device errors of the copy, and those of
    /// [`Device::synchronize`].
    pub fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<()> {
        self.inside(offset, size_of_val(values))?;
        self.device.bind()?;
        // SAFETY: the source is alive until the copy is done, which the wait ensures, and the target was checked.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.at(offset), values.as_ptr().cast(), size_of_val(values), self.device.stream)
        };
        check(status, "copying to the GPU")?;
        self.device.synchronize()
    }

    /// Queues a copy from page-locked memory.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the bytes reach beyond either buffer. Device errors of the driver, named by
    /// the copy.
    ///
    /// # Safety
    /// The bytes of `from` must not change until the stream has completed the copy.
    pub unsafe fn write_pinned(&self, offset: usize, from: &Pinned, start: usize, bytes: usize) -> Result<()> {
        self.inside(offset, bytes)?;
        from.inside(start, bytes)?;
        self.device.bind()?;
        // SAFETY: both ranges were checked, the pinned buffer synchronises before it is freed, and the caller does not write to
        // it.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.at(offset), from.pointer.add(start).cast(), bytes, self.device.stream)
        };
        check(status, "copying to the GPU")
    }

    /// Copies bytes to the start of page-locked memory after all queued work, and waits.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the bytes reach beyond either buffer. Device errors of the copy, and those
    /// of [`Device::synchronize`].
    pub fn read_pinned(&self, offset: usize, to: &mut Pinned, bytes: usize) -> Result<()> {
        self.inside(offset, bytes)?;
        to.inside(0, bytes)?;
        self.device.bind()?;
        // SAFETY: both ranges were checked, and the wait below ends the copy before `to` can be used again.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.pointer.cast(), self.at(offset), bytes, self.device.stream) };
        check(status, "copying from the GPU")?;
        self.device.synchronize()
    }

    /// Reads `count` values from byte `offset` after all queued work, and waits.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the values reach beyond the buffer. Device errors of the copy, and those of
    /// [`Device::synchronize`].
    pub fn read<T: Plain + Default>(&self, offset: usize, count: usize) -> Result<Vec<T>> {
        self.inside(offset, count.saturating_mul(size_of::<T>()))?;
        let mut values = vec![T::default(); count];
        self.read_into(offset, &mut values)?;
        Ok(values)
    }

    /// Fills `values` from byte `offset` on after all queued work, and waits.
    ///
    /// # Errors
    /// As [`Buffer::read`].
    pub fn read_into<T: Plain>(&self, offset: usize, values: &mut [T]) -> Result<()> {
        self.inside(offset, size_of_val(values))?;
        self.device.bind()?;
        // SAFETY: the target is alive until the copy is done, which the wait ensures, and the source was checked.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                values.as_mut_ptr().cast(),
                self.at(offset),
                size_of_val(values),
                self.device.stream,
            )
        };
        check(status, "copying from the GPU")?;
        self.device.synchronize()
    }

    /// Queues a copy within the device.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the bytes reach beyond either buffer. Device errors of the driver, named by
    /// the copy.
    pub fn copy_from(&self, offset: usize, from: &Buffer, start: usize, bytes: usize) -> Result<()> {
        self.inside(offset, bytes)?;
        from.inside(start, bytes)?;
        self.device.bind()?;
        // SAFETY: both ranges were checked.
        check(
            unsafe { sys::cuMemcpyDtoDAsync_v2(self.at(offset), from.at(start), bytes, self.device.stream) },
            "copying on the GPU",
        )
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the address came from cuMemAlloc; the driver waits for work that uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Page-locked host memory.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Its address for kernels. With unified addressing, which every 64-bit system has, it is the host's.
    pub fn address(&self) -> u64 {
        self.pointer as u64
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    fn inside(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::internal(format!("{bytes} bytes at {offset} of a page-locked buffer of {}", self.bytes))),
        }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory has that many initialised bytes and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Writes `values` at byte `offset`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the values reach beyond the memory.
    pub fn put<T: Plain>(&mut self, offset: usize, values: &[T]) -> Result<()> {
        let length = size_of_val(values);
        self.inside(offset, length)?;
        // SAFETY: the range was checked, T is plain bytes, and the regions cannot overlap.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr().cast(), self.pointer.add(offset), length) };
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: the pointer came from cuMemHostAlloc, and no copy is running.
        unsafe { sys::cuMemFreeHost(self.pointer.cast()) };
    }
}

/// Two more streams, for copies to the host and to the device, which run at the same time while the device works.
#[derive(Debug)]
pub struct Copies {
    device: Arc<Device>,
    to_host: sys::CUstream,
    to_device: sys::CUstream,
    /// The point in the device's stream that copies wait for.
    worked: Mark,
    /// The copies to the host that those to the device wait for.
    left: Mark,
    /// The copies that the device's stream waits for.
    copied: Mark,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Copies {}

impl Copies {
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn new(device: &Arc<Device>) -> Result<Copies> {
        let (to_host, to_device) = (ptr::null_mut(), ptr::null_mut());
        let (worked, left, copied) = (device.mark()?, device.mark()?, device.mark()?);
        let mut copies = Copies { device: device.clone(), to_host, to_device, worked, left, copied };
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        for stream in [&mut copies.to_host, &mut copies.to_device] {
            // SAFETY: the stream is owned by `copies`, whose Drop releases it.
            check(unsafe { sys::cuStreamCreate(stream, flags) }, "cuStreamCreate")?;
        }
        Ok(copies)
    }

    /// Later copies begin after the work that is queued now.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn wait_for_work(&self) -> Result<()> {
        self.worked.set(false)?;
        [self.to_host, self.to_device].into_iter().try_for_each(|stream| after(stream, &self.worked))
    }

    /// Later copies to the device begin after the copies to the host that are queued now.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn wait_for_host(&self) -> Result<()> {
        self.device.bind()?;
        note(self.to_host, &self.left)?;
        after(self.to_device, &self.left)
    }

    /// Notes the copies queued so far for [`Copies::hold_work`].
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn note(&self) -> Result<()> {
        self.wait_for_host()?;
        note(self.to_device, &self.copied)
    }

    /// Later work begins after the noted copies.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn hold_work(&self) -> Result<()> {
        self.device.bind()?;
        after(self.device.stream, &self.copied)
    }

    /// Queues a copy from byte `start` of `from` to byte `offset` of `to`.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the bytes reach beyond either memory. Device errors of the driver, named by
    /// the copy.
    ///
    /// # Safety
    /// Both memories must outlive `self`. Work on their bytes must be ordered by the methods above.
    pub unsafe fn to_device(
        &self,
        (to, offset): (&Buffer, usize),
        (from, start): (&Pinned, usize),
        bytes: usize,
    ) -> Result<()> {
        to.inside(offset, bytes)?;
        from.inside(start, bytes)?;
        self.device.bind()?;
        // SAFETY: both ranges were checked; the caller guarantees the rest.
        let status =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.at(offset), from.pointer.add(start).cast(), bytes, self.to_device) };
        check(status, "copying to the GPU")
    }

    /// Queues a copy from byte `offset` of `from` to byte `start` of `to`.
    ///
    /// # Errors
    /// As [`Copies::to_device`].
    ///
    /// # Safety
    /// As [`Copies::to_device`].
    pub unsafe fn to_host(
        &self,
        (from, offset): (&Buffer, usize),
        (to, start): (&Pinned, usize),
        bytes: usize,
    ) -> Result<()> {
        from.inside(offset, bytes)?;
        to.inside(start, bytes)?;
        self.device.bind()?;
        // SAFETY: as above.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.pointer.add(start).cast(), from.at(offset), bytes, self.to_host) };
        check(status, "copying from the GPU")
    }
}

/// Moves a mark to the end of a stream.
fn note(stream: sys::CUstream, mark: &Mark) -> Result<()> {
    // SAFETY: stream and event are alive.
    check(unsafe { sys::cuEventRecordWithFlags(mark.event, stream, 0) }, "cuEventRecord")
}

/// Later work of a stream begins after a mark.
fn after(stream: sys::CUstream, mark: &Mark) -> Result<()> {
    // SAFETY: stream and event are alive.
    check(unsafe { sys::cuStreamWaitEvent(stream, mark.event, 0) }, "cuStreamWaitEvent")
}

impl Drop for Copies {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            for stream in [self.to_host, self.to_device].into_iter().filter(|stream| !stream.is_null()) {
                // SAFETY: owned; the wait ends copies before their memory is freed.
                unsafe {
                    sys::cuStreamSynchronize(stream);
                    sys::cuStreamDestroy_v2(stream);
                }
            }
        }
    }
}

/// A recorded sequence of launches.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    exec: sys::CUgraphExec,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues the recorded work.
    ///
    /// # Errors
    /// Device errors of the driver. An error while the recorded work runs is reported by a later call, as for
    /// [`Device::launch`].
    ///
    /// # Safety
    /// Every recorded address must still be valid.
    pub unsafe fn launch(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the executable lives as long as `self`.
        let status = unsafe { sys::cuGraphLaunch(self.exec, self.device.stream) };
        self.device.note(Queued::Graph);
        check(status, "launching recorded steps")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: owned; the driver keeps a running graph alive.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// A point in the stream.
#[derive(Debug)]
pub struct Mark {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// Moves the mark to this point of the stream. With `recording`, it is set in every launch of the graph being recorded.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn set(&self, recording: bool) -> Result<()> {
        self.device.bind()?;
        let flags = if recording { sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32 } else { 0 };
        // SAFETY: event and stream are alive.
        check(unsafe { sys::cuEventRecordWithFlags(self.event, self.device.stream, flags) }, "cuEventRecord")
    }

    /// Seconds from `self` to `later`; waits for `later`.
    ///
    /// # Errors
    /// As [`Device::synchronize`], and device errors of the driver if `self` comes after `later`.
    pub fn seconds_to(&self, later: &Mark) -> Result<f64> {
        self.device.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive.
        unsafe {
            self.device.waited(sys::cuEventSynchronize(later.event))?;
            check(sys::cuEventElapsedTime(&mut milliseconds, self.event, later.event), "cuEventElapsedTime")?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: owned.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
