//! A grammar for tests: the last token and the answer's length determine the allowed tokens.

use quantspec_core::Result;
use quantspec_core::grammar::{Grammar, Mask, words};
use std::sync::Mutex;

/// Two fifths of the vocabulary may follow any token.
pub(crate) fn follows(answer: &[u32], token: u32) -> bool {
    let last = answer.last().map_or(0, |&last| u64::from(last));
    (u64::from(token) * 7 + last * 13 + answer.len() as u64) % 5 < 2
}

/// True if the grammar allows a whole answer.
pub(crate) fn allows(answer: &[u32]) -> bool {
    (0..answer.len()).all(|at| follows(&answer[..at], answer[at]))
}

#[derive(Debug)]
pub(crate) struct Fifths {
    vocab: usize,
    answer: Mutex<Vec<u32>>,
}

impl Fifths {
    pub(crate) fn boxed(vocab: usize) -> Box<dyn Grammar> {
        Box::new(Fifths { vocab, answer: Mutex::new(Vec::new()) })
    }
}

impl Grammar for Fifths {
    fn mask(&self, drafted: &[u32]) -> Result<Option<Mask>> {
        let mut answer = self.answer.lock().expect("no test panics in here").clone();
        assert!(allows(&answer), "a committed token was forbidden");
        answer.extend(drafted);
        if !allows(&answer) {
            return Ok(None);
        }
        let mut mask = vec![0; words(self.vocab)];
        for token in (0..self.vocab as u32).filter(|&token| follows(&answer, token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(Some(mask.into()))
    }

    fn advance(&self, tokens: &[u32]) {
        self.answer.lock().expect("no test panics in here").extend(tokens);
    }
}
