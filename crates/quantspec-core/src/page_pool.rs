//! Physical pages: which are free, which sequences read each, and the page table of every slot.
//!
//! A page that prefill has completed is a function of the tokens up to its end, so sequences whose prompts begin alike read
//! the same physical pages. A page without readers is free. Every backend allocates by this type; a physical page
//! is a number that stands for the page of every layer and KV head.
//!
//! A pool may keep a page window of each sequence: its first page and the newest ones. Newer pages then replace older ones:
//!
//! ```text
//! logical page     0   1   2   3   4   5   6
//! physical page    a   b   c   d   b   c   d        four pages kept
//! ```

use crate::cache::G;
use crate::plan::pages;
use crate::{Error, Result};
use std::ops::Range;

/// The leading pages of an open slot, for another sequence to share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The slot that has the pages.
    pub slot: usize,
    /// Number of pages, from the first on; all complete.
    pub pages: usize,
}

/// The pages of an engine and the page tables of its slots.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// The next page to take is the last.
    free: Vec<u32>,
    /// Number of sequences that read each physical page.
    readers: Vec<u32>,
    /// By slot.
    tables: Vec<Table>,
    /// Most pages of a sequence, at least two.
    kept: usize,
}

#[derive(Clone, Debug, Default)]
struct Table {
    /// Physical page of each logical page. The first ones, up to the pool's `kept`, differ.
    pages: Vec<u32>,
    /// Leading pages that were complete when the slot was opened.
    shared: usize,
}

/// Pages to keep of a sequence whose steps read a page window, the first page and the newest `window - 1` visible ones: these,
/// and one that is complete before it is visible. `reach`: tokens that a query sees in the model's local layers, if it has such.
pub fn kept_of_window(window: usize, reach: Option<usize>) -> usize {
    // The reach begins inside a page, and the first page is kept in any case.
    let local = reach.map_or(0, |reach| reach.div_ceil(G) + 2);
    window.max(local).max(2) + 1
}

impl PagePool {
    /// A pool of free pages, and `slots` slots without pages.
    pub fn new(pages: usize, slots: usize) -> PagePool {
        PagePool {
            free: (0..pages as u32).rev().collect(),
            readers: vec![0; pages],
            tables: vec![Table::default(); slots],
            kept: usize::MAX,
        }
    }

    /// The pool with at most `kept` pages of each sequence, at least two: the first and the newest. Its sequences share no pages.
    #[must_use]
    pub fn keeping(self, kept: usize) -> PagePool {
        PagePool { kept: kept.max(2), ..self }
    }

    /// All pages.
    pub fn pages(&self) -> usize {
        self.readers.len()
    }

    /// Pages without a reader.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages that a sequence of up to `capacity` tokens takes from the free ones. It reads those of `prefix` in addition.
    pub fn needed(capacity: usize, prefix: Option<Prefix>) -> usize {
        pages(capacity).saturating_sub(prefix.map_or(0, |prefix| prefix.pages))
    }

    /// Gives a slot pages for a sequence of up to `capacity` tokens, after closing it. The first are those of `prefix`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::DoesNotFit`] if too few pages are free, [`crate::ErrorKind::Internal`] if there is no such slot or
    /// `prefix` names pages that its slot or this sequence does not have or keep. The slot has no pages then.
    pub fn open(&mut self, slot: usize, capacity: usize, prefix: Option<Prefix>) -> Result<()> {
        self.close(slot);
        if slot >= self.tables.len() {
            return Err(Error::internal(format!("slot {slot} of {}", self.tables.len())));
        }
        let shared = match prefix {
            None => Some(&[][..]),
            Some(_) if self.kept < usize::MAX => None,
            Some(of) => self.table(of.slot).get(..of.pages).filter(|_| of.pages <= pages(capacity)),
        };
        let Some(shared) = shared else {
            return Err(Error::internal(format!("slot {slot} of {capacity} tokens cannot share {prefix:?}")));
        };
        let (needed, free) = (PagePool::needed(capacity, prefix).min(self.kept), self.free.len());
        if needed > free {
            return Err(Error::does_not_fit(
                format!("{needed} pages for {capacity} tokens; {free} of {} are free", self.pages()),
                "finish a sequence first, or plan for more tokens",
            ));
        }
        let mut table = Table { pages: shared.to_vec(), shared: shared.len() };
        table.pages.extend(self.free.drain(free - needed..).rev());
        table.pages.iter().for_each(|page| self.readers[*page as usize] += 1);
        let ring = table.pages.len();
        let replacing = (ring..pages(capacity)).map(|page| 1 + (page - 1) % (ring - 1));
        table.pages.extend(replacing.map(|page| table.pages[page]).collect::<Vec<_>>());
        self.tables[slot] = table;
        Ok(())
    }

    /// Ends a slot's sequence; pages without another reader become free.
    pub fn close(&mut self, slot: usize) {
        let Some(table) = self.tables.get_mut(slot).map(std::mem::take) else { return };
        for page in table.pages.into_iter().take(self.kept).rev() {
            self.readers[page as usize] -= 1;
            if self.readers[page as usize] == 0 {
                self.free.push(page);
            }
        }
    }

    /// Physical page of each logical page of a slot; empty if it is closed.
    pub fn table(&self, slot: usize) -> &[u32] {
        self.tables.get(slot).map_or(&[], |table| &table.pages)
    }

    /// Leading pages of a slot that were complete when it was opened. Its prefill must not write them.
    pub fn shared(&self, slot: usize) -> usize {
        self.tables.get(slot).map_or(0, |table| table.shared)
    }

    /// The logical pages among `pages` that are left after all of these were written in order: two runs, of which one may be
    /// empty.
    pub fn left_of(&self, pages: Range<usize>) -> [Range<usize>; 2] {
        let Range { start, end } = pages;
        if end <= self.kept {
            return [start..end, end..end];
        }
        [start..start.max(1).min(end), start.max(end - (self.kept - 1))..end]
    }

    /// The physical page to write a slot's logical page to.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the slot has no such page or another sequence reads it.
    pub fn own(&self, slot: usize, page: usize) -> Result<usize> {
        let physical = self.table(slot).get(page).map(|physical| *physical as usize);
        let physical = physical.filter(|physical| self.readers[*physical] == 1);
        let own = physical.filter(|_| page >= self.shared(slot));
        own.ok_or_else(|| Error::internal(format!("page {page} is not one that slot {slot} may write")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::cache::G;
    use proptest::prelude::*;

    /// Every page is either free or read, as often as tables name it.
    fn check(pool: &PagePool, slots: usize) {
        let mut readers = vec![0; pool.pages()];
        for slot in 0..slots {
            let mut own = pool.table(slot).to_vec();
            own.iter().for_each(|page| readers[*page as usize] += 1);
            own.sort_unstable();
            own.dedup();
            assert_eq!(own.len(), pool.table(slot).len(), "slot {slot} has a page twice");
            for page in 0..own.len() {
                let alone = readers_of(pool, slots, pool.table(slot)[page]) == 1;
                assert_eq!(pool.own(slot, page).is_ok(), alone && page >= pool.shared(slot), "page {page} of {slot}");
            }
        }
        let mut free = pool.free.clone();
        free.sort_unstable();
        let unread: Vec<u32> = (0..pool.pages() as u32).filter(|page| readers[*page as usize] == 0).collect();
        assert_eq!((free, &pool.readers), (unread, &readers));
    }

    fn readers_of(pool: &PagePool, slots: usize, page: u32) -> usize {
        (0..slots).filter(|slot| pool.table(*slot).contains(&page)).count()
    }

    #[test]
    fn a_page_is_free_when_its_last_reader_leaves() {
        let mut pool = PagePool::new(8, 3);
        pool.open(0, 5 * G + 1, None).unwrap();
        // Eight pages would not hold both without sharing.
        let prefix = Prefix { slot: 0, pages: 4 };
        assert_eq!(PagePool::needed(6 * G, Some(prefix)), 2);
        pool.open(1, 6 * G, Some(prefix)).unwrap();
        assert_eq!((pool.free(), pool.shared(1), pool.shared(0)), (1, 4, 0));
        assert_eq!(pool.table(1)[..4], pool.table(0)[..4]);
        assert!(pool.own(0, 3).is_err() && pool.own(0, 4).is_ok() && pool.own(1, 3).is_err() && pool.own(1, 4).is_ok());
        // The third shares with the second, which outlives the first.
        pool.close(0);
        assert_eq!(pool.free(), 2);
        assert!(pool.own(1, 3).is_err(), "the only reader does not write a complete page");
        pool.open(2, 5 * G, Some(Prefix { slot: 1, pages: 3 })).unwrap();
        pool.close(1);
        assert_eq!((pool.free(), pool.table(2).len()), (3, 5));
        pool.close(2);
        pool.close(2);
        assert_eq!(pool.free(), 8);
        check(&pool, 3);
    }

    #[test]
    fn a_sequence_that_does_not_fit_takes_nothing() {
        let mut pool = PagePool::new(4, 2);
        pool.open(0, 3 * G, None).unwrap();
        let cases = [
            (1, 5 * G, Some(Prefix { slot: 0, pages: 3 }), ErrorKind::DoesNotFit),
            (1, 2 * G, None, ErrorKind::DoesNotFit),
            (1, 4 * G, Some(Prefix { slot: 0, pages: 4 }), ErrorKind::Internal),
            (1, 2 * G, Some(Prefix { slot: 0, pages: 3 }), ErrorKind::Internal),
            (1, 2 * G, Some(Prefix { slot: 1, pages: 1 }), ErrorKind::Internal),
            (1, 2 * G, Some(Prefix { slot: 7, pages: 1 }), ErrorKind::Internal),
            (2, G, None, ErrorKind::Internal),
        ];
        for (slot, capacity, prefix, kind) in cases {
            let refused = pool.open(slot, capacity, prefix).map_err(|error| error.kind);
            assert_eq!(refused, Err(kind), "{capacity} tokens, {prefix:?}");
            assert_eq!((pool.free(), pool.table(1).len()), (1, 0));
        }
    }

    #[test]
    fn a_window_keeps_the_first_and_the_newest_pages() {
        let mut pool = PagePool::new(9, 2).keeping(4);
        pool.open(0, 7 * G, None).unwrap();
        assert_eq!((pool.table(0), pool.free()), (&[0, 1, 2, 3, 1, 2, 3][..], 5));
        assert!((0..7).all(|page| pool.own(0, page) == Ok(pool.table(0)[page] as usize)));
        // A short sequence takes what it needs; no sequence shares pages that may be replaced.
        pool.open(1, 3 * G + 1, None).unwrap();
        assert_eq!((pool.table(1).len(), pool.free()), (3, 2));
        let shared = pool.open(1, 7 * G, Some(Prefix { slot: 0, pages: 1 }));
        assert_eq!(shared.map_err(|error| error.kind), Err(ErrorKind::Internal));
        for (pages, left) in [
            (0..4, [0..4, 4..4]),
            (0..7, [0..1, 4..7]),
            (3..7, [3..3, 4..7]),
            (6..7, [6..6, 6..7]),
            (0..0, [0..0, 0..0]),
        ] {
            assert_eq!(pool.left_of(pages.clone()), left, "{pages:?}");
        }
        pool.close(0);
        assert_eq!((pool.free(), PagePool::new(9, 1).left_of(2..9)), (9, [2..9, 9..9]));
    }

    /// Pages that steps read are never replaced: at every length, the first, the newest visible ones and those of a reach.
    #[test]
    fn what_a_window_reads_is_kept() {
        for (window, reach) in [(2, None), (3, None), (16, None), (2, Some(512)), (3, Some(320)), (9, Some(512))] {
            let kept = kept_of_window(window, reach);
            let mut pool = PagePool::new(kept, 1).keeping(kept);
            pool.open(0, 60 * G, None).unwrap();
            let mut written = vec![None; kept];
            for position in 0..58 * G {
                // All pages that are complete before this token.
                for page in 0..position / G {
                    written[pool.own(0, page).unwrap()] = Some(page);
                }
                let visible = crate::cache::visible_pages(position);
                let mut read = crate::attend::window_pages(visible, window);
                read.extend(reach.map_or(visible, |reach| crate::cache::first_visible(position, reach) / G)..visible);
                for page in read {
                    assert_eq!(written[pool.table(0)[page] as usize], Some(page), "{window} {reach:?} {position}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_page_is_both_free_and_read(
            steps in prop::collection::vec((0usize..5, 0usize..12 * G, 0usize..5, 0usize..10, any::<bool>()), 1..120),
        ) {
            let mut pool = PagePool::new(30, 5);
            for (slot, capacity, from, most, leave) in steps {
                if leave {
                    pool.close(slot);
                } else {
                    let shared = most.min(pool.table(from).len()).min(capacity / G);
                    let prefix = (slot != from && shared > 0).then_some(Prefix { slot: from, pages: shared });
                    let room = pool.free() + (0..pool.table(slot).len())
                        .filter(|page| readers_of(&pool, 5, pool.table(slot)[*page]) == 1).count();
                    let fits = PagePool::needed(capacity, prefix) <= room;
                    prop_assert_eq!(pool.open(slot, capacity, prefix).is_ok(), fits);
                    prop_assert_eq!(pool.table(slot).len(), if fits { capacity / G } else { 0 });
                }
                check(&pool, 5);
            }
            (0..5).for_each(|slot| pool.close(slot));
            prop_assert_eq!(pool.free(), 30);
        }
    }
}
