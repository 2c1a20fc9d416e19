//! Penalties on tokens that occur in the text, applied to logits before the warpers of [`crate::sample`].
//!
//! The penalty of a row depends on the committed text and on the drafted tokens before the row, in draft and target alike. So
//! it is part of the target's distribution, and speculation stays lossless.
//!
//! Penalties apply in this order:
//!
//! * Repetition (Keskar et al., arXiv 1909.05858; prompt and answer, as in Hugging Face): divides positive logits of tokens
//!   that occurred and multiplies the others.
//! * Frequency and presence (OpenAI): subtract `frequency · n + presence` from logits of tokens that occur n > 0 times in the
//!   answer.
//! * No-repeat-n-gram (Hugging Face): forbids tokens that would complete an n-gram of the text. Its n bounds the work of a
//!   row; DRY, the alternative, compares suffixes of any length.

use crate::error::{Error, Result};
use std::borrow::Cow;
use std::collections::HashMap;

/// Largest n of no-repeat-n-gram.
pub const NGRAM_MAX: usize = 100;

/// Penalties of a text. Built by [`Penalties::new`], which checks the ranges; the default is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits of tokens of prompt and answer, multiplies the others; 1 is off.
    pub repetition: f32,
    /// Subtracted from a token's logit once per occurrence in the answer; 0 is off.
    pub frequency: f32,
    /// Subtracted once from the logit of each token of the answer; 0 is off.
    pub presence: f32,
    /// Length n of the n-grams that an answer may not repeat from prompt and answer; 0 is off.
    pub no_repeat_ngram: usize,
}

impl Default for Penalties {
    fn default() -> Penalties {
        Penalties { repetition: 1.0, frequency: 0.0, presence: 0.0, no_repeat_ngram: 0 }
    }
}

impl Penalties {
    /// Checked penalties.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Usage`] if a value is outside its range.
    pub fn new(repetition: f32, frequency: f32, presence: f32, no_repeat_ngram: usize) -> Result<Penalties> {
        if !(0.01..=100.0).contains(&repetition) {
            return Err(Error::usage(
                format!("repetition penalty is {repetition}"),
                "give a number from 0.01 to 100; 1 is off, and 1.1 to 1.3 usual",
            ));
        }
        for (name, value) in [("frequency", frequency), ("presence", presence)] {
            if !(-2.0..=2.0).contains(&value) {
                return Err(Error::usage(format!("{name} penalty is {value}"), "give a number from -2 to 2; 0 is off"));
            }
        }
        if no_repeat_ngram == 1 || no_repeat_ngram > NGRAM_MAX {
            return Err(Error::usage(
                format!("no-repeat-ngram is {no_repeat_ngram}"),
                format!("give 0 (off) or 2 to {NGRAM_MAX} tokens"),
            ));
        }
        Ok(Penalties { repetition, frequency, presence, no_repeat_ngram })
    }

    /// Returns true if all penalties are off.
    pub fn is_none(&self) -> bool {
        *self == Penalties::default()
    }

    /// The penalised logit of a token that occurs in the text, `count` times in the answer.
    fn of(&self, logit: f32, count: u32) -> f32 {
        let logit = if logit < 0.0 { logit * self.repetition } else { logit / self.repetition };
        if count == 0 { logit } else { logit - self.frequency * count as f32 - self.presence }
    }
}

/// The committed text of one sequence, indexed for penalties.
#[derive(Clone, Debug)]
pub struct History {
    penalties: Penalties,
    /// Prompt and answer.
    text: Vec<u32>,
    prompt: usize,
    answer: usize,
    /// Distinct tokens, and how often each is in the answer.
    counts: Vec<(u32, u32)>,
    /// Where a token is in `counts`.
    indices: HashMap<u32, usize>,
    /// End of the last n-gram whose first n − 1 tokens have this hash. `older[end]` is the previous such end; `usize::MAX` is
    /// none.
    newest: HashMap<u64, usize>,
    older: Vec<usize>,
}

impl History {
    /// The history of a prompt without an answer. `answer` numbers the answers to one prompt; see [`History::answer`].
    pub fn new(prompt: &[u32], penalties: Penalties, answer: usize) -> History {
        let mut history = History {
            penalties,
            text: Vec::new(),
            prompt: prompt.len(),
            answer,
            counts: Vec::new(),
            indices: HashMap::new(),
            newest: HashMap::new(),
            older: Vec::new(),
        };
        history.extend(prompt);
        history
    }

    /// Appends committed tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        let n = self.penalties.no_repeat_ngram;
        for &token in tokens {
            let index = *self.indices.entry(token).or_insert(self.counts.len());
            if index == self.counts.len() {
                self.counts.push((token, 0));
            }
            self.counts[index].1 += u32::from(self.text.len() >= self.prompt);
            self.text.push(token);
            if n > 0 {
                let end = self.text.len() - 1;
                let before = match (end + 1).checked_sub(n) {
                    Some(start) => self.newest.insert(hash(self.text[start..end].iter()), end),
                    None => None,
                };
                self.older.push(before.unwrap_or(usize::MAX));
            }
        }
    }

    /// The penalties of this text.
    pub fn penalties(&self) -> &Penalties {
        &self.penalties
    }

    /// Committed tokens of prompt and answer.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    /// Number of the answer to this prompt. A device copy of the text is rebuilt if this number differs.
    pub fn answer(&self) -> usize {
        self.answer
    }

    /// Calls `forbid` with every token that would complete an n-gram that already occurs in text and `drafted`.
    fn forbidden(&self, drafted: &[u32], mut forbid: impl FnMut(u32)) {
        let n = self.penalties.no_repeat_ngram;
        let length = self.text.len() + drafted.len();
        if n == 0 || length < n {
            return;
        }
        let at = |i: usize| self.text.get(i).or_else(|| drafted.get(i - self.text.len())).copied().unwrap_or(0);
        let last: Vec<u32> = (length + 1 - n..length).map(at).collect();
        let mut end = self.newest.get(&hash(last.iter())).copied().unwrap_or(usize::MAX);
        while let Some(&token) = self.text.get(end) {
            if self.text[end + 1 - n..end] == last[..] {
                forbid(token);
            }
            end = self.older[end];
        }
        // `newest` does not hold n-grams that end among the drafted tokens.
        for end in self.text.len().max(n - 1)..length {
            if (0..n - 1).all(|i| at(end + 1 - n + i) == last[i]) {
                forbid(at(end));
            }
        }
    }
}

/// FNV-1a over tokens. Tokens are compared as well if hashes are equal.
fn hash<'a>(tokens: impl Iterator<Item = &'a u32>) -> u64 {
    tokens.fold(0xcbf2_9ce4_8422_2325, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3))
}

/// Penalises the logits `[vocab]` of the row after the committed text and the `drafted` tokens. Tokens outside `logits` are
/// ignored. Work grows with the distinct tokens of the text and the n-grams with the same beginning.
pub fn apply(logits: &mut [f32], history: &History, drafted: &[u32]) {
    let penalties = &history.penalties;
    // A drafted token changes the count of a text token, so its unpenalised logit is saved first.
    let again: Vec<(usize, f32, u32)> = drafted
        .iter()
        .filter_map(|&token| {
            let count = drafted.iter().filter(|&&other| other == token).count() as u32;
            let before = history.indices.get(&token).map_or(0, |&index| history.counts[index].1);
            Some((token as usize, *logits.get(token as usize)?, before + count))
        })
        .collect();
    for &(token, count) in &history.counts {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = penalties.of(*logit, count);
        }
    }
    for (token, logit, count) in again {
        logits[token] = penalties.of(logit, count);
    }
    history.forbidden(drafted, |token| {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    });
}

/// The logits to choose a token from: `logits` itself, unless there are penalties.
pub fn penalised<'a>(logits: &'a [f32], history: Option<&History>, drafted: &[u32]) -> Cow<'a, [f32]> {
    match history {
        None => Cow::Borrowed(logits),
        Some(history) => {
            let mut own = logits.to_vec();
            apply(&mut own, history, drafted);
            Cow::Owned(own)
        }
    }
}

/// The history that penalties need for a prompt; `None` if all are off.
pub fn history(prompt: &[u32], penalties: Penalties, answer: usize) -> Option<History> {
    (!penalties.is_none()).then(|| History::new(prompt, penalties, answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn penalties_check_their_ranges() {
        assert!(Penalties::new(1.0, 0.0, 0.0, 0).unwrap().is_none());
        assert!(!Penalties::new(1.1, 0.0, 0.0, 0).unwrap().is_none());
        for good in [(0.01, -2.0, 2.0, 2), (100.0, 2.0, -2.0, NGRAM_MAX)] {
            assert!(Penalties::new(good.0, good.1, good.2, good.3).is_ok());
        }
        for bad in [0.0, -1.0, 100.5, f32::NAN, f32::INFINITY] {
            let error = Penalties::new(bad, 0.0, 0.0, 0).unwrap_err();
            assert_eq!(error.kind, crate::ErrorKind::Usage);
            assert!(error.message.contains(&bad.to_string()), "{error}");
        }
        for bad in [-2.1, 2.1, f32::NAN] {
            assert!(Penalties::new(1.0, bad, 0.0, 0).is_err() && Penalties::new(1.0, 0.0, bad, 0).is_err());
        }
        for bad in [1, NGRAM_MAX + 1] {
            assert!(Penalties::new(1.0, 0.0, 0.0, bad).is_err());
        }
    }

    #[test]
    fn known_penalties() {
        let penalties = Penalties::new(2.0, 0.5, 0.25, 3).unwrap();
        let mut history = History::new(&[0, 1, 4], penalties, 0);
        history.extend(&[2, 2]);
        let mut logits = [3.0, -3.0, 4.0, 1.0, -1.0, 5.0];
        apply(&mut logits, &history, &[]);
        // Tokens 0, 1 and 4 occur in the prompt only; token 2 twice in the answer.
        assert_eq!(logits, [1.5, -6.0, 2.0 - 1.0 - 0.25, 1.0, -2.0, 5.0]);
        let mut logits = [3.0, -3.0, 4.0, 1.0, -1.0, 5.0];
        // 4 2 2 | 0 4 2: the text contains 4 2 2, so 2 is forbidden.
        apply(&mut logits, &history, &[0, 4, 2]);
        assert_eq!(logits, [1.5 - 0.75, -6.0, f32::NEG_INFINITY, 1.0, -2.0 - 0.75, 5.0]);
    }

    /// The definitions, applied directly to the whole text.
    fn by_definition(logits: &[f32], p: &Penalties, prompt: &[u32], answer: &[u32]) -> Vec<f32> {
        let text: Vec<u32> = prompt.iter().chain(answer).copied().collect();
        let n = p.no_repeat_ngram;
        let penalised = |(id, &logit): (usize, &f32)| {
            let mut x = logit;
            if text.contains(&(id as u32)) {
                x = if x < 0.0 { x * p.repetition } else { x / p.repetition };
            }
            let count = answer.iter().filter(|&&token| token as usize == id).count();
            if count > 0 {
                x = x - p.frequency * count as f32 - p.presence;
            }
            let mut longer = text.clone();
            longer.push(id as u32);
            let repeats = n > 0 && longer.len() > n && {
                let last = &longer[longer.len() - n..];
                text.windows(n).any(|gram| gram == last)
            };
            if repeats { f32::NEG_INFINITY } else { x }
        };
        logits.iter().enumerate().map(penalised).collect()
    }

    proptest! {
        #[test]
        fn penalties_equal_their_definition(
            logits in prop::collection::vec(-6.0f32..6.0, 7),
            prompt in prop::collection::vec(0u32..7, 0..30), answer in prop::collection::vec(0u32..7, 0..20),
            drafted in 0usize..17, repetition in prop_oneof![Just(1.0f32), 0.5f32..2.0], frequency in prop_oneof![Just(0.0f32), -2.0f32..2.0],
            presence in prop_oneof![Just(0.0f32), -2.0f32..2.0], n in prop_oneof![Just(0usize), 2usize..6],
        ) {
            let penalties = Penalties::new(repetition, frequency, presence, n).unwrap();
            // The answer is either committed in parts or drafted.
            let committed = answer.len() - drafted.min(answer.len());
            let mut history = History::new(&prompt, penalties, 0);
            history.extend(&answer[..committed / 2]);
            history.extend(&answer[committed / 2..committed]);
            let got = penalised(&logits, Some(&history), &answer[committed..]);
            let want = by_definition(&logits, &penalties, &prompt, &answer);
            prop_assert_eq!(&got[..], &want[..]);
        }
    }
}
