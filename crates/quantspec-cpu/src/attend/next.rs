//! The page after the one under work, fetched line by line.

use super::Planes;
use crate::dispatch::fetch_far;

/// What is left of the next page: a core has some sixteen lines under way at most, and a burst of requests waits as loads do, so
/// they are asked for evenly, between the operations on this page.
pub(super) struct Next<'a> {
    /// Upper and lower block.
    blocks: [&'a [u8]; 2],
}

impl<'a> Next<'a> {
    /// The blocks of `page` that `planes` are in.
    pub(super) fn new(page: Option<(&'a [u8], &'a [u8])>, planes: Planes) -> Next<'a> {
        let (upper, lower) = page.unwrap_or_default();
        Next { blocks: [upper, if planes.both() { lower } else { &[] }] }
    }

    /// Nothing is fetched.
    pub(super) const fn none() -> Next<'a> {
        Next { blocks: [&[]; 2] }
    }

    /// Lines in all.
    pub(super) const fn len(&self) -> usize {
        (self.blocks[0].len() + self.blocks[1].len()) / 64
    }

    /// Asks for one more line.
    #[inline(always)]
    pub(super) fn line(&mut self) {
        let [block, after] = self.blocks;
        if let Some((line, rest)) = block.split_at_checked(64) {
            fetch_far(line.as_ptr());
            self.blocks = [rest, after];
        } else {
            self.blocks = [after, &[]];
        }
    }
}
