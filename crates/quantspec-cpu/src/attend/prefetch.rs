//! The page after the one under work, fetched line by line.

use super::Planes;
use crate::dispatch::fetch_far;

/// What is left of the next page: a core has some sixteen lines under way at most, and a burst of requests waits as loads do, so
/// they are asked for evenly, between the operations on this page.
pub(super) struct PagePrefetch {
    /// First address and lines of what is left of the block under way, and of the other block.
    left: (*const u8, usize),
    after: (*const u8, usize),
}

fn lines<T>(block: &[T]) -> (*const u8, usize) {
    (block.as_ptr().cast(), size_of_val(block) / 64)
}

impl PagePrefetch {
    /// The blocks of `page` that `planes` are in.
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

    /// Asks for one more line.
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
