//! Recorded launches (graphs), points in time of the stream (marks), and copies on streams of their own.

use super::{Buffer, Device, Pinned, Queued, check};
use cudarc::driver::sys;
use quantspec_core::Result;
use std::ptr;
use std::sync::Arc;

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
    pub fn uploads_wait_for_downloads(&self) -> Result<()> {
        self.device.bind()?;
        note(self.to_host, &self.left)?;
        after(self.to_device, &self.left)
    }

    /// Marks the copies queued so far as those that [`Copies::work_waits`] is about.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn record(&self) -> Result<()> {
        self.uploads_wait_for_downloads()?;
        note(self.to_device, &self.copied)
    }

    /// Later work begins after the marked copies.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub fn work_waits(&self) -> Result<()> {
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
    pub(super) device: Arc<Device>,
    pub(super) exec: sys::CUgraphExec,
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
pub(crate) struct Mark {
    pub(super) device: Arc<Device>,
    pub(super) event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// Moves the mark to this point of the stream. With `recording`, it is set in every launch of the graph being recorded.
    ///
    /// # Errors
    /// Device errors of the driver, named by the call.
    pub(crate) fn set(&self, recording: bool) -> Result<()> {
        self.device.bind()?;
        let flags = if recording { sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32 } else { 0 };
        // SAFETY: event and stream are alive.
        check(unsafe { sys::cuEventRecordWithFlags(self.event, self.device.stream, flags) }, "cuEventRecord")
    }

    /// Seconds from `self` to `later`; waits for `later`.
    ///
    /// # Errors
    /// As [`Device::synchronize`], and device errors of the driver if `self` comes after `later`.
    pub(crate) fn seconds_to(&self, later: &Mark) -> Result<f64> {
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
