//! Memory of weights, caches and scratch: 64-byte aligned, zeroed, in huge pages if large. Lack of memory is an error, not an
//! abort.

use quantspec_core::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every array: a cache line and an AVX-512 vector, so that no load straddles two lines.
pub(crate) const ALIGN: usize = 64;

/// Arrays of at least this size are mapped separately, with this alignment: the size of a huge page on x86-64 and aarch64.
#[cfg(unix)]
const HUGE: usize = 2 << 20;

/// Array sizes are rounded up to this, a multiple of every system's page size. Rounding to [`HUGE`] would waste up to a huge
/// page per array, which the memory plan does not count.
#[cfg(unix)]
const PAGE: usize = 64 << 10;

/// Returns freed memory from the allocator to the system, if the allocator supports it.
pub fn give_back_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc's malloc_trim changes free memory only, under the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes threads share one heap, if the allocator supports it: glibc reserves 64 MB of address space for each further heap.
pub(crate) fn share_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt changes the allocator's parameters only, under its own locks.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Types whose every bit pattern is a value, zero included.
///
/// # Safety
/// Implementors have no padding and no invalid bit patterns.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: all bit patterns of these are values.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A fixed array of numbers at a 64-byte boundary, initially zero. Pages of large arrays become resident when they are
/// written.
pub(crate) struct Array<T: Plain> {
    start: NonNull<T>,
    len: usize,
    /// Bytes mapped, or 0 if the allocator provided the memory.
    #[cfg(unix)]
    mapped: usize,
}

// SAFETY: an array owns its memory and lends it by the usual borrow rules.
unsafe impl<T: Plain> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Array<T> {}

fn too_large(bytes: usize) -> Error {
    Error::does_not_fit(
        format!("the system refused {bytes} bytes of memory"),
        "close other programs, or ask for a shorter context, fewer sequences at once, or a smaller model",
    )
}

impl<T: Plain> Array<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if memory is short.
    pub(crate) fn zeros(len: usize) -> Result<Array<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize / 2);
        let Some(bytes) = bytes else { return Err(too_large(usize::MAX)) };
        #[cfg(unix)]
        if bytes >= HUGE {
            return Array::map(len, bytes);
        }
        let layout = Array::<T>::layout(bytes).ok_or_else(|| too_large(bytes))?;
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<T>()).ok_or_else(|| too_large(bytes))?;
        Ok(Array {
            start,
            len,
            #[cfg(unix)]
            mapped: 0,
        })
    }

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.max(1), ALIGN).ok()
    }

    #[cfg(unix)]
    fn map(len: usize, bytes: usize) -> Result<Array<T>> {
        let wanted = bytes.next_multiple_of(PAGE);
        // SAFETY: a new private anonymous mapping does not touch other memory. It is one huge page longer than needed, and
        // the unaligned ends are unmapped. `munmap` and `madvise` get page-aligned parts of this mapping.
        unsafe {
            let start = libc::mmap(
                std::ptr::null_mut(),
                wanted + HUGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if start == libc::MAP_FAILED {
                return Err(too_large(bytes));
            }
            let before = start.align_offset(HUGE);
            let aligned = start.add(before);
            if before > 0 {
                libc::munmap(start, before);
            }
            libc::munmap(aligned.add(wanted), HUGE - before);
            // Advice only: a kernel without huge pages refuses it, and the array works without.
            #[cfg(target_os = "linux")]
            libc::madvise(aligned, wanted, libc::MADV_HUGEPAGE);
            match NonNull::new(aligned.cast::<T>()) {
                Some(start) => Ok(Array { start, len, mapped: wanted }),
                None => Err(too_large(bytes)),
            }
        }
    }

    /// Bytes of the elements.
    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements as bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a plain type has no padding, so all bytes of initialised elements are.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes()) }
    }
}

impl<T: Plain> Drop for Array<T> {
    fn drop(&mut self) {
        #[cfg(unix)]
        if self.mapped > 0 {
            // SAFETY: exactly what `map` kept.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
            return;
        }
        if let Some(layout) = Array::<T>::layout(self.bytes()) {
            // SAFETY: allocated by `zeros` with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<T: Plain> Deref for Array<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements, owned by this array.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// A slice that the threads of one dispatch write: every element is written by at most one thread.
///
/// Holding one is safe; [`DisjointSlice::slice`] states the caller's obligations.
pub(crate) struct DisjointSlice<'a, T> {
    start: *mut T,
    len: usize,
    of: std::marker::PhantomData<&'a mut [T]>,
}

impl<T> Clone for DisjointSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DisjointSlice<'_, T> {}
// SAFETY: access goes through `slice`, whose callers keep parts disjoint between threads.
unsafe impl<T: Send> Send for DisjointSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    /// Shares `slice` for the length of its borrow.
    pub(crate) fn new(slice: &'a mut [T]) -> DisjointSlice<'a, T> {
        DisjointSlice { start: slice.as_mut_ptr(), len: slice.len(), of: std::marker::PhantomData }
    }

    /// Elements `at .. at + len`.
    ///
    /// # Safety
    /// No overlapping slice is alive at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at <= self.len && len <= self.len - at, "part {at}..+{len} of {}", self.len);
        // SAFETY: inside the borrowed slice; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_aligned_and_zero_whatever_their_size() {
        for len in [0, 1, 63, 64, 1000, 524_288, 524_289, 3_000_001] {
            let mut array = Array::<f32>::zeros(len).unwrap();
            assert_eq!(array.as_ptr() as usize % ALIGN, 0, "{len}");
            assert_eq!(array.len(), len);
            assert!(array.iter().all(|x| x.to_bits() == 0));
            array.fill(1.0);
            assert!(array.iter().all(|x| *x == 1.0));
        }
    }

    #[test]
    #[cfg(unix)]
    fn an_array_takes_the_bytes_that_the_plan_counts() {
        // Plans add up elements, and a model has hundreds of arrays slightly larger than a multiple of a huge page.
        let array = Array::<u8>::zeros(HUGE + 1).unwrap();
        assert_eq!((array.as_ptr() as usize % HUGE, array.mapped), (0, HUGE + PAGE));
    }

    #[test]
    fn missing_memory_is_an_error() {
        for len in [usize::MAX, usize::MAX / 4, 1 << 60] {
            let error = Array::<f32>::zeros(len).err().map(|error| error.kind);
            assert_eq!(error, Some(quantspec_core::ErrorKind::DoesNotFit), "{len}");
        }
    }

    #[test]
    #[should_panic(expected = "part 3..+2 of 4")]
    fn a_part_outside_the_slice_panics() {
        let mut values = [0u8; 4];
        let parts = DisjointSlice::new(&mut values);
        // SAFETY: the only slice alive.
        let _ = unsafe { parts.slice(3, 2) };
    }
}
