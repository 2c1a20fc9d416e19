//! Prompts: prefill in chunks between the rounds of other sequences, and the prompt cache.

use super::{Engine, Sequence, found};
use crate::backend::{Backend, Turn};
use crate::forward::{self, Chunk, PrefillCursor};
use quantspec_core::logprob;
use quantspec_core::{Error, Result};
use std::ops::Range;
use std::time::Instant;

impl<B: Backend> Engine<B> {
    /// Processes the slot's prompt and returns the first emitted token. `progress` is called with rows done and rows in
    /// total.
    ///
    /// # Errors
    /// As [`Engine::prefill_timed`].
    pub fn prefill(&mut self, slot: usize, progress: &mut dyn FnMut(usize, usize)) -> Result<u32> {
        Ok(self.prefill_timed(slot, 0, progress)?.0)
    }

    /// Continues the slot's prompt for about `most_rows` rows, counted over all layers, at least one block. Returns the first
    /// emitted token at the prompt's end, `None` before it. Rounds of other slots may run in between; tokens do not depend on
    /// the chunks. Only one prompt at a time: the backend has room for one.
    ///
    /// # Errors
    /// As [`Engine::prefill_timed`].
    pub fn prefill_chunk(
        &mut self,
        slot: usize,
        most_rows: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Option<u32>> {
        let started = Instant::now();
        let (computed, ended) = self.read_prompt(slot, most_rows.max(1), progress)?;
        let first = if ended { Some(self.first_token(slot)?) } else { None };
        let sequence = found(&mut self.sequences, slot)?;
        sequence.prefill_s += started.elapsed().as_secs_f64();
        if ended {
            let (seconds, tokens) = (sequence.prefill_s, sequence.prompt_tokens);
            let reuse = sequence.cursor.take().and_then(|mut cursor| cursor.take_reuse());
            if let (Some(reuse), Some(prompts)) = (reuse, &mut self.prompts) {
                prompts.keep(reuse);
            }
            self.stats.prefill(computed, tokens - computed, seconds);
        }
        Ok(first)
    }

    /// Runs a chunk of the slot's prompt. Returns the number of the prompt's tokens that are computed, not restored, and
    /// whether it ended.
    fn read_prompt(
        &mut self,
        slot: usize,
        most_rows: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(usize, bool)> {
        let mut computed = self.begin_prompt(slot)?;
        let block_rows = self.block_rows;
        if !self.read_by_drafter(slot, computed, most_rows, progress)? {
            return Ok((computed, false));
        }
        loop {
            let (backend, _, sequence) = self.working(slot)?;
            let Some(cursor) = &mut sequence.cursor else {
                return Err(Error::internal("a prompt that began has no cursor"));
            };
            match forward::prefill_chunk(backend, slot, &sequence.text, block_rows, cursor, most_rows, progress)? {
                Chunk::More => return Ok((computed, false)),
                Chunk::End => return Ok((computed, true)),
                Chunk::Damaged => {
                    let reuse = sequence.cursor.take().and_then(|mut cursor| cursor.take_reuse());
                    if let (Some(reuse), Some(prompts)) = (reuse, &mut self.prompts) {
                        prompts.forget(reuse);
                    }
                    computed = self.begin_prompt(slot)?;
                }
            }
        }
    }

    /// Continues the prompt in the drafter's own network for the work of `most_rows` rows of the target; true at its end.
    /// `computed`: rows of the prompt that the target will compute. It comes before the target, whose logits are to be read at
    /// the end.
    fn read_by_drafter(
        &mut self,
        slot: usize,
        computed: usize,
        most_rows: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<bool> {
        let (backend, drafter, sequence) = self.working(slot)?;
        let Some(drafter) = drafter else { return Ok(true) };
        let layers = backend.config().layers;
        let work = most_rows as f64 * backend.memory().weights_bytes as f64 / layers as f64;
        drafter.read_prompt(slot, &sequence.text, work, &mut || progress(0, layers * computed))
    }

    /// Chooses the token after a prompt that has been read; the sequence decodes from now on.
    fn first_token(&mut self, slot: usize) -> Result<u32> {
        let (backend, drafter, sequence) = self.working(slot)?;
        let tokens = sequence.text.len();
        let logits = sequence.logprobs.map(|_| backend.logits(0)).transpose()?;
        let (history, constraint) = (sequence.history.clone(), sequence.constraint.clone());
        let turn = Turn { history, constraint, ..Turn::new(slot, tokens, 0, sequence.sampler.clone()) };
        let token = backend.first(&turn)?;
        // The text grows in place, so no turn may hold a reference.
        drop(turn);
        if let (Some(logits), Some(top)) = (logits, sequence.logprobs) {
            sequence.token_logprobs.push(logprob::of(&logits, token, top));
        }
        backend.set_window(slot, &[token])?;
        if let Some(drafter) = drafter {
            drafter.prefill(slot, &sequence.text, token)?;
        }
        sequence.emit(&[token]);
        sequence.extent.commit(tokens);
        sequence.running = true;
        sequence.remaining -= 1;
        Ok(token)
    }

    /// Looks up a prompt in the prompt cache before its prefill. Returns the number of tokens to compute.
    fn begin_prompt(&mut self, slot: usize) -> Result<usize> {
        let Engine { sequences, prompts, .. } = self;
        let unfinished = |sequence: &Sequence| sequence.cursor.is_some() && !sequence.running;
        let mut others = sequences.iter().enumerate().filter(|&(other, _)| other != slot);
        if let Some((other, _)) = others.find(|(_, one)| one.as_ref().is_some_and(unfinished)) {
            return Err(Error::usage(
                format!("slot {slot} cannot be prefilled while the prompt of slot {other} is unfinished"),
                "finish that prefill, or end its sequence, first",
            ));
        }
        let sequence = found(sequences, slot)?;
        if sequence.running {
            return Err(Error::usage(format!("slot {slot} is already prefilled"), "call prefill once per sequence"));
        }
        let cursor = sequence.cursor.get_or_insert_with(|| match prompts {
            Some(prompts) => PrefillCursor::reusing(prompts.find(&sequence.text)),
            None => PrefillCursor::default(),
        });
        Ok(sequence.text.len() - cursor.first())
    }

    /// [`Engine::prefill`], and the seconds spent on the prompt's rows from `from` on: their cost at that depth. The time of
    /// a block with rows on both sides is split by rows, and so is the quantising of a layer.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the slot holds no sequence or is already prefilled, or if another slot's prompt
    /// is unfinished, and those of [`forward::prefill_chunk`], [`crate::backend::TokenSampler::first`],
    /// [`crate::backend::KvCache::set_window`] and [`crate::draft::Drafter::prefill`].
    pub fn prefill_timed(
        &mut self,
        slot: usize,
        from: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(u32, f64)> {
        let computed = self.begin_prompt(slot)?;
        let first_row = found(&mut self.sequences, slot)?.text.len() - computed;
        let (mut last, mut early_s, mut done) = (Instant::now(), 0.0, 0);
        let mut timed = |rows: usize, total: usize| {
            if rows == 0 {
                // A block of the drafter's network, which counts as late.
                last = Instant::now();
                return progress(rows, total);
            }
            // Rows are counted over all layers. A call without new rows ends a layer, which involves all of its rows.
            let new = if rows > done { rows - done } else { computed };
            let end = first_row + (rows - 1) % computed + 1;
            early_s += last.elapsed().as_secs_f64() * share_before(from, end.saturating_sub(new)..end);
            (last, done) = (Instant::now(), rows);
            progress(rows, total);
        };
        let token = self.prefill_chunk(slot, usize::MAX, &mut timed)?;
        let token = token.ok_or_else(|| Error::internal("a prefill without a bound did not end"))?;
        // `prefill_s` is the time that the statistics count, so the two agree.
        Ok((token, found(&mut self.sequences, slot)?.prefill_s - early_s))
    }
}

/// The share of a block's rows that come before row `from`.
fn share_before(from: usize, block: Range<usize>) -> f64 {
    (from.clamp(block.start, block.end) - block.start) as f64 / block.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_split_at_a_row() {
        assert_eq!([0, 8, 10, 12, 99].map(|from| share_before(from, 8..12)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    }
}
