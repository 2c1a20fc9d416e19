//! Prefetching of the next page, line by line.

use super::Planes;
use crate::dispatch::fetch_far;

/// The lines of the next page that are left to prefetch. A core tracks about sixteen outstanding lines, and a longer burst
/// stalls like loads do. So prefetches are spread evenly over the operations on the current page.
pub(super) struct PagePrefetch {
    /// Start and number of lines left of the current block, and of the other block.
    left: (*const u8, usize),
    after: (*const u8, usize),
}

fn lines<T>(block: &[T]) -> (*const u8, usize) {
    (block.as_ptr().cast(), size_of_val(block) / 64)
}

impl PagePrefetch {
    /// The blocks of `page` that `planes` reads.
    pub(super) fn new(page: Option<(&[u8], &[u8])>, planes: Planes) -> PagePrefetch {
        let (upper, lower) = page.unwrap_or_default();
        PagePrefetch { left: lines(upper), after: lines(if planes.both() { lower } else { &[] }) }
    }

    /// A page of halves.
    pub(super) fn halves(page: Option<&[u16]>) -> PagePrefetch {
        PagePrefetch { left: lines(page.unwrap_or_default()), after: lines::<u8>(&[]) }
    }

    /// Lines in all.
    pub(super) const fn len(&self) -> usize {
        self.left.1 + self.after.1
    }

    /// Prefetches one more line.
    #[inline(always)]
    pub(super) fn line(&mut self) {
        let (at, count) = &mut self.left;
        if *count > 0 {
            fetch_far(*at);
            *at = at.wrapping_add(64);
            *count -= 1;
        } else {
            self.left = std::mem::replace(&mut self.after, lines::<u8>(&[]));
        }
    }
}
