//! Visibility law: which tokens a query reads from pages, which from the buffer, and when a page is complete.
//!
//! Everything is a function of positions (docs/design/cache.md). So decoding does not depend on when pages were quantised, on
//! γ, or on the other rows of a call.

use std::ops::Range;

/// Tokens of a page and of a key-quantisation group: 128, as in the paper. The byte layouts assert it.
pub const G: usize = 128;

/// Tokens in the ring of recent keys and values of a sequence. A query at p reads at most the 2G − 1 tokens before it, and
/// the window of a round adds up to [`GAMMA_MAX`] + 1. So three pages are the smallest ring that never overwrites a visible
/// token.
pub const BUFFER_TOKENS: usize = 3 * G;

/// Largest γ, far above the values that pay (4 to 8). It keeps a round's window inside one spare page of the ring.
pub const GAMMA_MAX: usize = 16;

const _: () = assert!(2 * G + GAMMA_MAX < BUFFER_TOKENS);

/// First token that a query at `position` reads from the buffer; it reads all earlier tokens from pages. `Q(p) = G · max(0,
/// ⌊p/G⌋ − 1)`: the last G to 2G − 1 tokens before the query are in full precision.
pub const fn visible_quantised(position: usize) -> usize {
    (position / G).saturating_sub(1) * G
}

/// Pages a query at `position` reads: `Q(p) / G`.
pub const fn visible_pages(position: usize) -> usize {
    (position / G).saturating_sub(1)
}

/// Tokens that a query at `position` reads from the buffer, including itself.
pub const fn visible_buffer(position: usize) -> Range<usize> {
    visible_quantised(position)..position + 1
}

/// First token that a query at `position` sees if it sees `reach` tokens, including its own. If `reach` is at least 2G, this
/// is at most [`visible_quantised`], so the query sees all tokens that it reads from the buffer.
pub const fn first_visible(position: usize, reach: usize) -> usize {
    (position + 1).saturating_sub(reach)
}

/// Index of a token in the ring. Pages keep their alignment: page b begins at `(b mod 3)·G`.
pub const fn ring_index(position: usize) -> usize {
    position % BUFFER_TOKENS
}

/// Committed extent of one sequence.
///
/// A round writes its window into the buffer after `committed`. Rejected tokens are not committed, and the next round
/// overwrites them. Pages hold committed tokens only, so rollback never touches them.
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

    /// Commits `tokens` more tokens. Returns the pages that became complete; the caller must quantise them now.
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
        fn a_reach_has_all_recent_tokens(position in 0usize..1_000_000, reach in 2 * G..100_000) {
            let first = first_visible(position, reach);
            prop_assert!(first <= visible_quantised(position) && position + 1 - first == reach.min(position + 1));
        }

        #[test]
        fn a_round_never_overwrites_what_it_reads(committed in 0usize..1_000_000, gamma in 0..=GAMMA_MAX) {
            // The window's last write must not overwrite the oldest token that its first row reads.
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
