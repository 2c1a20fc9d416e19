//! Memory of a GPU, and page-locked memory of its host.

use super::{Device, check};
use cudarc::driver::sys;
use quantspec_core::{Error, Result};
use std::ptr;
use std::sync::Arc;

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
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Buffer {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Device address of byte `offset`.
    pub fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.bytes, "byte {offset} of a buffer of {}", self.bytes);
        self.address + offset as u64
    }

    pub(super) fn inside(&self, offset: usize, bytes: usize) -> Result<()> {
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
    pub(super) device: Arc<Device>,
    pub(super) pointer: *mut u8,
    pub(super) bytes: usize,
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

    pub(super) fn inside(&self, offset: usize, bytes: usize) -> Result<()> {
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
