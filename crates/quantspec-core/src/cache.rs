//! Extents of the cache: which tokens a query reads from pages, which from the buffer, and when a page is complete.
//!
//! Everything is a function of positions (docs/design/cache.md), so decoding does not depend on when pages were
//! quantised, on γ, or on the rows that share a call.

use std::ops::Range;

/// Tokens of a page and of a key-quantisation group. The paper's value; the byte layouts assert it.
pub const G: usize = 128;

/// Tokens the ring of recent keys and values holds per sequence. A query at p reads at most 2G − 1 tokens behind it and the
/// window of a round adds up to [`GAMMA_MAX`] + 1, so three pages are the least that never overwrites a visible token.
pub const BUFFER_TOKENS: usize = 3 * G;

/// Largest γ. Far above what pays (γ 4 to 8); it keeps a round's window inside one page of slack.
pub const GAMMA_MAX: usize = 16;

const _: () = assert!(2 * G + GAMMA_MAX < BUFFER_TOKENS);

/// First token a query at `position` reads from the buffer; all tokens before it are read from pages.
/// `Q(p) = G · max(0, ⌊p/G⌋ − 1)`: between G and 2G − 1 tokens before the query stay in full precision.
pub const fn visible_quantised(position: usize) -> usize {
    (position / G).saturating_sub(1) * G
}

/// Pages a query at `position` reads: `Q(p) / G`.
pub const fn visible_pages(position: usize) -> usize {
    (position / G).saturating_sub(1)
}

/// Tokens a query at `position` reads from the buffer, itself included.
pub const fn visible_buffer(position: usize) -> Range<usize> {
    visible_quantised(position)..position + 1
}

/// Place of a token in the ring of the buffer. Pages keep their alignment: page b occupies ring slots `(b mod 3)·G ..`.
pub const fn buffer_slot(position: usize) -> usize {
    position % BUFFER_TOKENS
}

/// Committed extent of one sequence.
///
/// Rollback is the absence of a commit: a round writes into the buffer behind `committed`, and what is not committed is
/// overwritten by the next round. Nothing quantised is ever taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    committed: usize,
    flushed_pages: usize,
}

impl Extent {
    /// Tokens whose keys and values were computed by the target and accepted.
    pub fn committed(&self) -> usize {
        self.committed
    }

    /// Pages already quantised.
    pub fn flushed_pages(&self) -> usize {
        self.flushed_pages
    }

    /// Appends `tokens` committed tokens and returns the pages that became complete, to be quantised now.
    pub fn commit(&mut self, tokens: usize) -> Range<usize> {
        self.committed += tokens;
        let first = self.flushed_pages;
        self.flushed_pages = self.committed / G;
        first..self.flushed_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn law_at_the_borders() {
        let cases = [(0, 0), (127, 0), (128, 0), (255, 0), (256, 128), (383, 128), (384, 256), (5000, 4864)];
        for (position, quantised) in cases {
            assert_eq!(visible_quantised(position), quantised, "position {position}");
        }
    }

    proptest! {
        #[test]
        fn recent_tokens_stay_in_full_precision(position in 0usize..1_000_000) {
            let recent = position - visible_quantised(position);
            prop_assert!(recent < 2 * G);
            prop_assert!(position < 2 * G || recent >= G);
            prop_assert_eq!(visible_pages(position) * G, visible_quantised(position));
        }

        #[test]
        fn a_round_never_overwrites_what_it_reads(committed in 0usize..1_000_000, gamma in 0..=GAMMA_MAX) {
            // The window's last write must not reach the ring slot of the oldest token its first row reads.
            let oldest = visible_quantised(committed);
            prop_assert!(committed + gamma - oldest < BUFFER_TOKENS);
        }

        #[test]
        fn a_page_is_flushed_before_it_is_visible_and_before_it_is_overwritten(steps in prop::collection::vec(1..=GAMMA_MAX + 1, 1..200)) {
            let mut extent = Extent::default();
            let mut pages = 0;
            for step in steps {
                let complete = extent.commit(step);
                prop_assert_eq!(complete.start, pages);
                pages = complete.end;
                prop_assert!(visible_pages(extent.committed() + GAMMA_MAX) <= pages);
                prop_assert!(extent.committed() - pages * G < G);
            }
        }
    }
}
