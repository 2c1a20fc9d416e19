//! Grammars: the tokens that may follow each prefix of an answer. All others are masked before a token is chosen.
//!
//! The mask of a row depends on the committed answer and on the drafted tokens before the row, in draft and target alike. So
//! it is part of the target's distribution, as penalties are ([`crate::penalty`]), and speculation stays lossless. Masks are
//! applied after penalties.

use crate::error::Result;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

/// Tokens that may follow, one bit each: token t is bit t mod 32 of word t / 32. Tokens beyond the last word may not follow.
pub type Mask = Arc<[u32]>;

/// Words of a mask over `vocab` tokens.
pub const fn words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// A position in a grammar: the end of the committed answer.
pub trait Grammar: Debug + Send + Sync {
    /// The tokens that may follow `drafted`. `None` allows all: if `drafted` is not allowed, or the answer has ended.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Input`] if the work exceeds the grammar's limits.
    fn mask(&self, drafted: &[u32]) -> Result<Option<Mask>>;

    /// Appends `tokens` to the answer; those after its end token are ignored.
    fn advance(&self, tokens: &[u32]);
}

/// Drafted prefixes with their masks.
type Known = Vec<(Vec<u32>, Option<Mask>)>;

/// A grammar with a cache of the round's masks: a verified row needs the mask with which its token was drafted.
#[derive(Debug)]
pub struct Constraint {
    grammar: Box<dyn Grammar>,
    known: Mutex<Known>,
}

impl Constraint {
    /// A constraint at the beginning of an answer.
    pub fn new(grammar: Box<dyn Grammar>) -> Constraint {
        Constraint { grammar, known: Mutex::new(Vec::new()) }
    }

    /// [`Grammar::mask`], from the cache if possible.
    ///
    /// # Errors
    /// Those of [`Grammar::mask`].
    pub fn mask(&self, drafted: &[u32]) -> Result<Option<Mask>> {
        if let Some((_, mask)) = self.known().iter().find(|(prefix, _)| prefix == drafted) {
            return Ok(mask.clone());
        }
        let mask = self.grammar.mask(drafted)?;
        self.known().push((drafted.to_vec(), mask.clone()));
        Ok(mask)
    }

    /// [`Grammar::advance`]; ends the round.
    pub fn advance(&self, tokens: &[u32]) {
        self.known().clear();
        self.grammar.advance(tokens);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Sets the logits `[vocab]` of tokens that may not follow to −∞.
pub fn apply(logits: &mut [f32], mask: &[u32]) {
    for (word, logits) in logits.chunks_mut(32).enumerate() {
        let allowed = mask.get(word).copied().unwrap_or(0);
        for (_, logit) in logits.iter_mut().enumerate().filter(|(bit, _)| allowed >> bit & 1 == 0) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[test]
    fn a_mask_leaves_its_tokens() {
        let mut logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
        apply(&mut logits, &[1 << 31 | 1, 1 << 2]);
        let left: Vec<usize> = (0..70).filter(|&i| logits[i] > f32::NEG_INFINITY).collect();
        assert_eq!(left, [0, 31, 34]);
        assert!(left.iter().all(|&i| logits[i] == i as f32));
        assert_eq!((words(0), words(1), words(32), words(33)), (0, 1, 1, 2));
    }

    #[derive(Debug, Default)]
    struct Counted(AtomicUsize);

    impl Grammar for Counted {
        fn mask(&self, drafted: &[u32]) -> Result<Option<Mask>> {
            self.0.fetch_add(1, Relaxed);
            Ok(drafted.last().map(|&last| Mask::from([last])))
        }

        fn advance(&self, tokens: &[u32]) {
            self.0.fetch_add(100 * tokens.len(), Relaxed);
        }
    }

    #[test]
    fn a_mask_is_computed_once_a_round() {
        let constraint = Constraint::new(Box::<Counted>::default());
        for _ in 0..3 {
            assert_eq!(constraint.mask(&[]).unwrap(), None);
            assert_eq!(constraint.mask(&[7]).unwrap().as_deref(), Some(&[7][..]));
            assert_eq!(constraint.mask(&[7, 9]).unwrap().as_deref(), Some(&[9][..]));
        }
        assert!(format!("{constraint:?}").contains("Counted(3)"));
        constraint.advance(&[7, 8]);
        assert_eq!(constraint.mask(&[7]).unwrap().as_deref(), Some(&[7][..]));
        assert!(format!("{constraint:?}").contains("Counted(204)"));
    }
}
