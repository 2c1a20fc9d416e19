//! Sequences and rounds: the stateful part of the method.
//!
//! A round is `draft` then `verify` (docs/algorithm.md). The engine keeps each sequence's extent, its last emitted token
//! (whose keys and values are not cached yet), the γ policy and the statistics; the backend computes. There is no rollback:
//! tokens that `verify` does not commit are overwritten by the next round.
//!
//! This file has the sequences, from [`Engine::add`] to [`Engine::finish`]; `prompt.rs` has prefill, `round.rs` the rounds.

mod prompt;
mod round;

use crate::backend::{Backend, Memory, Turn};
use crate::draft::Drafter;
use crate::evaluate;
use crate::forward::{self, PrefillCursor};
use crate::prompt_cache::PromptCache;
use crate::rope::RopeTable;
use quantspec_core::cache::{BUFFER_TOKENS, Extent, visible_quantised};
use quantspec_core::config::{Pages, View};
use quantspec_core::grammar::{Constraint, Grammar};
use quantspec_core::logprob::Logprob;
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::penalty::{self, History};
use quantspec_core::plan::pages;
use quantspec_core::policy::Policy;
use quantspec_core::sample::Sampler;
use quantspec_core::stats::Stats;
use quantspec_core::{Error, Result};
use std::sync::Arc;

/// How an engine decodes, on any device.
#[derive(Debug)]
pub struct Method {
    /// View of the cache that defines the target distribution.
    pub target: View,
    /// The drafter; `None` decodes autoregressively (γ = 0 through the same code).
    pub drafter: Option<Box<dyn Drafter>>,
    /// Chooses γ.
    pub policy: Policy,
}

impl Method {
    /// The policy chooses among the drafter's candidates.
    fn of_candidates(mut self) -> Method {
        let candidates = self.drafter.as_ref().map_or(1, |drafter| drafter.candidates());
        self.policy = self.policy.with_candidates(candidates);
        self
    }
}

/// One sequence being decoded.
#[derive(Debug)]
struct Sequence {
    /// The prompt, and the answer so far.
    text: Vec<u32>,
    prompt_tokens: usize,
    sampler: Sampler,
    /// The text in the form penalties need; `None` without penalties.
    history: Option<Arc<History>>,
    /// Grammar of the answer; `None` without one.
    constraint: Option<Arc<Constraint>>,
    /// Number of earlier answers to the prompt.
    answers: usize,
    /// Number of most likely tokens to return with each token's log-probability; `None` without log-probabilities.
    logprobs: Option<usize>,
    /// Log-probabilities not yet taken.
    token_logprobs: Vec<Logprob>,
    /// Tokens it may emit in all.
    max_new_tokens: usize,
    /// Leading pages that another sequence had when it was added.
    shared_pages: usize,
    /// Tokens it may still emit.
    remaining: usize,
    extent: Extent,
    /// End of the positions written to the buffer so far, including drafted ones.
    written: usize,
    /// Prefill is done, and the window holds the last emitted token.
    running: bool,
    /// None before its prompt is begun.
    cursor: Option<PrefillCursor>,
    /// Seconds that its prefill has taken.
    prefill_s: f64,
}

impl Sequence {
    /// Appends committed tokens to the text.
    fn emit(&mut self, tokens: &[u32]) {
        self.text.extend(tokens);
        if let Some(history) = &mut self.history {
            Arc::make_mut(history).extend(tokens);
        }
        if let Some(constraint) = &self.constraint {
            constraint.advance(tokens);
        }
    }
}

/// What a round emitted for one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// Sequence slot.
    pub slot: usize,
    /// Token ids in order: the accepted drafted ones, then one chosen by the target.
    pub tokens: Vec<u32>,
    /// The drafted tokens that were verified.
    pub drafted: Vec<u32>,
}

/// The backend, the drafter and a sequence of an engine.
type Working<'a, B> = (&'a mut B, Option<&'a mut (dyn Drafter + 'static)>, &'a mut Sequence);

/// Decodes batches of sequences of any lengths on one backend.
pub struct Engine<B: Backend> {
    backend: B,
    method: Method,
    capacity: usize,
    block_rows: usize,
    sequences: Vec<Option<Sequence>>,
    /// The current round: turns whose windows hold drafted tokens.
    turns: Vec<Turn>,
    /// Steps of its draft, and their seconds so far.
    draft_time: Option<(usize, f64)>,
    /// Pages of the cache that each of these steps read; `None` if it read none.
    pages_read: Option<Pages>,
    stats: Stats,
    /// Memory of the backend before any text.
    loaded: Memory,
    /// [`Backend::draft_read_bytes`].
    draft_read_bytes: usize,
    prompts: Option<PromptCache>,
    rope: RopeTable,
}

impl<B: Backend> Engine<B> {
    /// An engine with `slots` sequences of up to `capacity` tokens each; prompts are processed in blocks of `block_rows`.
    pub fn new(backend: B, method: Method, slots: usize, capacity: usize, block_rows: usize) -> Engine<B> {
        Engine {
            loaded: backend.memory(),
            draft_read_bytes: backend.draft_read_bytes(),
            rope: RopeTable::new(backend.config()),
            backend,
            method: method.of_candidates(),
            capacity,
            block_rows,
            sequences: (0..slots).map(|_| None).collect(),
            turns: Vec::new(),
            draft_time: None,
            pages_read: None,
            stats: Stats::default(),
            prompts: None,
        }
    }

    /// True if a prompt can be added now: a slot is free, and so are the pages that it does not share.
    pub fn has_room(&self, prompt: &[u32], max_new_tokens: usize) -> bool {
        self.room(prompt, prompt.len().saturating_add(max_new_tokens)).is_ok()
    }

    /// A free slot for a sequence of `tokens` tokens, and the pages that its prompt can share.
    fn room(&self, prompt: &[u32], tokens: usize) -> Result<(usize, Option<Prefix>)> {
        let (slot, prefix) = (self.free_slot()?, self.shared_prefix(prompt));
        self.check_room(tokens, prefix)?;
        Ok((slot, prefix))
    }

    /// Pages, each of every layer and KV head, that the sequences share.
    pub fn page_pool(&self) -> &PagePool {
        self.backend.page_pool()
    }

    fn check_room(&self, tokens: usize, prefix: Option<Prefix>) -> Result<()> {
        let (needed, pool) = (PagePool::needed(tokens, prefix), self.page_pool());
        if needed <= pool.free() {
            return Ok(());
        }
        Err(Error::usage(
            format!("{tokens} tokens need {needed} pages; {} of {} are free", pool.free(), pool.pages()),
            "finish a sequence first, or open the engine for more tokens",
        ))
    }

    /// The most pages that a prompt can share with a running sequence: complete pages of the other's prompt with the same
    /// tokens up to their ends. Pages of an answer come from other kernels, so they are not among them.
    fn shared_prefix(&self, prompt: &[u32]) -> Option<Prefix> {
        let class = |tokens: usize| self.rope.length_class(tokens);
        let common = |(slot, sequence): (usize, &Option<Sequence>)| {
            let one = sequence.as_ref().filter(|one| one.running && class(one.prompt_tokens) == class(prompt.len()))?;
            let pairs = prompt.iter().zip(&one.text[..one.prompt_tokens]);
            Some(Prefix { slot, pages: pages(pairs.take_while(|(a, b)| a == b).count()) })
        };
        let longest = self.sequences.iter().enumerate().filter_map(common).max_by_key(|prefix| prefix.pages);
        longest.filter(|prefix| prefix.pages > 0)
    }

    /// Caches prompts from now on, and reuses their common prefixes.
    pub fn cache_prompts(&mut self, cache: PromptCache) {
        self.prompts = Some(cache);
    }

    /// The prompt cache; `None` if prompts are not kept.
    pub fn prompt_cache(&mut self) -> Option<&mut PromptCache> {
        self.prompts.as_mut()
    }

    /// Adds a prompt to a free slot and returns the slot. Pages that a running sequence has already are shared, not reserved.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] for an empty prompt, for 0 new tokens and if no slot or too few pages are free,
    /// [`quantspec_core::ErrorKind::Model`] for an id outside the vocabulary, [`quantspec_core::ErrorKind::DoesNotFit`] if
    /// prompt and `max_new_tokens` exceed the capacity, and those of [`crate::backend::KvCache::open_sharing`].
    pub fn add(&mut self, prompt: &[u32], sampler: Sampler, max_new_tokens: usize) -> Result<usize> {
        self.check_request(prompt, max_new_tokens)?;
        let wanted = prompt.len() + max_new_tokens;
        let (slot, prefix) = self.room(prompt, wanted)?;
        self.backend.open_sharing(slot, wanted, prefix)?;
        self.sequences[slot] = Some(Sequence {
            text: prompt.to_vec(),
            prompt_tokens: prompt.len(),
            history: penalty::history(prompt, sampler.penalties, 0).map(Arc::new),
            constraint: None,
            answers: 0,
            logprobs: None,
            token_logprobs: Vec::new(),
            sampler,
            max_new_tokens,
            shared_pages: prefix.map_or(0, |prefix| prefix.pages),
            remaining: max_new_tokens,
            extent: Extent::default(),
            written: prompt.len(),
            running: false,
            cursor: None,
            prefill_s: 0.0,
        });
        Ok(slot)
    }

    /// Refuses what [`Engine::add`] refuses in any slot.
    fn check_request(&self, prompt: &[u32], max_new_tokens: usize) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::usage(
                "the prompt has 0 tokens",
                "give at least one token, for example the model's BOS",
            ));
        }
        forward::check_ids(prompt, self.backend.config().vocab)?;
        if max_new_tokens == 0 {
            return Err(Error::usage("0 new tokens were requested", "ask for at least 1 with -n"));
        }
        let (length, capacity) = (prompt.len(), self.capacity);
        if length.saturating_add(max_new_tokens) <= capacity {
            return Ok(());
        }
        let hint = match (capacity.saturating_sub(max_new_tokens), capacity.saturating_sub(length)) {
            (0, 0) => "open the engine for longer sequences".to_string(),
            (0, new) => format!("ask for at most {new} new tokens"),
            (length, 0) => format!("shorten the prompt to at most {length} tokens"),
            (length, new) => {
                format!("shorten the prompt to at most {length} tokens, or ask for at most {new} new ones")
            }
        };
        let tokens = format!("prompt of {length} tokens and {max_new_tokens} new tokens");
        Err(Error::does_not_fit(format!("{tokens} exceed the capacity of {capacity}"), hint))
    }

    /// Makes the slot's answer follow a grammar, which is at its beginning. Call it before the prompt is processed.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the slot holds no sequence, or a token was emitted.
    pub fn constrain(&mut self, slot: usize, grammar: Box<dyn Grammar>) -> Result<()> {
        self.not_started(slot)?.constraint = Some(Arc::new(Constraint::new(grammar)));
        Ok(())
    }

    /// Requests log-probabilities of the slot's tokens, each with the `top` most likely tokens at its position. Call it
    /// before the prompt is processed; [`Engine::take_logprobs`] returns them.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the slot holds no sequence, or a token was emitted.
    pub fn want_logprobs(&mut self, slot: usize, top: usize) -> Result<()> {
        self.not_started(slot)?.logprobs = Some(top);
        Ok(())
    }

    /// A slot's sequence, which has emitted no token.
    fn not_started(&mut self, slot: usize) -> Result<&mut Sequence> {
        let (_, _, sequence) = self.working(slot)?;
        if sequence.running {
            return Err(Error::usage(
                format!("slot {slot} has emitted a token"),
                "ask for log-probabilities or a grammar before the prompt is processed",
            ));
        }
        Ok(sequence)
    }

    /// Log-probabilities of the slot's tokens after the last call, under the target's distribution before penalties, masks
    /// and warpers.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the slot holds no sequence.
    pub fn take_logprobs(&mut self, slot: usize) -> Result<Vec<Logprob>> {
        let (_, _, sequence) = self.working(slot)?;
        Ok(std::mem::take(&mut sequence.token_logprobs))
    }

    /// Changes the method from the next round on; its drafter gets every sequence's text. The backend must keep all planes
    /// that the drafter needs. After an error the method is as before; if both drafters share a draft model, the sequence of the
    /// error has no more drafts.
    ///
    /// # Errors
    /// Those of [`Drafter::prefill`].
    pub fn set_method(&mut self, method: Method) -> Result<()> {
        let mut method = method.of_candidates();
        if let Some(drafter) = method.drafter.as_deref_mut() {
            for (slot, sequence) in self.sequences.iter().enumerate() {
                let running = sequence.as_ref().filter(|one| one.running);
                let Some((last, before)) = running.and_then(|one| one.text.split_last()) else { continue };
                if let Err(error) = drafter.prefill(slot, before, *last) {
                    // A draft model would continue this prompt, though the text may be longer then.
                    drafter.close(slot);
                    return Err(error);
                }
            }
        }
        self.method = method;
        Ok(())
    }

    /// Restarts the slot's answer over its prompt's cache, without log-probabilities and grammar: `token` follows the prompt,
    /// then `max_new_tokens − 1` tokens of [`Engine::add`], chosen by `sampler`.
    ///
    /// Quantised pages of the prompt do not change. The buffer is valid if at most `BUFFER_TOKENS` positions were written
    /// after the oldest one that the first row reads. Otherwise this returns `false` without any change, and the prompt must
    /// be prefilled again.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if the slot holds no sequence or is not prefilled,
    /// [`quantspec_core::ErrorKind::Model`] if `token` is outside the vocabulary, and those of
    /// [`crate::backend::KvCache::set_window`] and [`Drafter::prefill`].
    pub fn restart(&mut self, slot: usize, token: u32, sampler: Sampler) -> Result<bool> {
        let (backend, drafter, sequence) = self.working(slot)?;
        forward::check_ids(&[token], backend.config().vocab)?;
        let prompt = sequence.prompt_tokens;
        if !sequence.running {
            return Err(Error::usage(format!("slot {slot} is not prefilled"), "call prefill before restart"));
        }
        if sequence.written > visible_quantised(prompt) + BUFFER_TOKENS {
            return Ok(false);
        }
        backend.set_window(slot, &[token])?;
        sequence.text.truncate(prompt);
        if let Some(drafter) = drafter {
            drafter.prefill(slot, &sequence.text, token)?;
        }
        sequence.answers += 1;
        sequence.history = penalty::history(&sequence.text, sampler.penalties, sequence.answers).map(Arc::new);
        (sequence.constraint, sequence.logprobs, sequence.token_logprobs) = (None, None, Vec::new());
        sequence.emit(&[token]);
        sequence.sampler = sampler;
        sequence.remaining = sequence.max_new_tokens - 1;
        sequence.extent = Extent::default();
        sequence.extent.commit(prompt);
        self.turns.retain(|turn| turn.slot != slot);
        Ok(true)
    }

    /// [`evaluate::score`] of a text under the target's view, in a free slot, between two rounds.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if no slot or too few pages are free, [`quantspec_core::ErrorKind::DoesNotFit`]
    /// beyond the capacity, and those of [`evaluate::score`].
    pub fn score(
        &mut self,
        tokens: &[u32],
        step_rows: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<f64>> {
        if tokens.len() > self.capacity {
            return Err(Error::does_not_fit(
                format!("a text of {} tokens exceeds the capacity of {}", tokens.len(), self.capacity),
                "shorten the text, or open the engine for longer sequences",
            ));
        }
        let slot = self.free_slot()?;
        self.check_room(tokens.len(), None)?;
        evaluate::score(&mut self.backend, self.method.target, slot, tokens, step_rows, progress)
    }

    fn free_slot(&self) -> Result<usize> {
        self.sequences.iter().position(Option::is_none).ok_or_else(|| {
            Error::usage(
                format!("all {} slots of the engine are in use", self.sequences.len()),
                "finish a sequence first, or open the engine with more slots",
            )
        })
    }

    /// Ends a sequence and frees its slot; its tokens remain valid.
    pub fn finish(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences.get_mut(slot).and_then(Option::take) {
            // A prompt that was interrupted says nothing about the size of answers.
            if sequence.running {
                let reserved = pages(sequence.prompt_tokens + sequence.max_new_tokens);
                let (filled, shared) = (sequence.extent.flushed_pages(), sequence.shared_pages);
                self.stats.pool_pages(reserved - shared, filled - shared);
            }
            self.turns.retain(|turn| turn.slot != slot);
            self.backend.close(slot);
            if let Some(drafter) = &mut self.method.drafter {
                drafter.close(slot);
            }
        }
    }

    /// Forgets counters and times.
    pub fn reset_stats(&mut self) {
        self.stats = Stats::default();
    }

    /// Counters and times so far, over all sequences.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Rows of a prefill block.
    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Bytes of the backend, and of the drafter's own network.
    pub fn memory(&self) -> Memory {
        let drafter = self.method.drafter.as_ref().map(|drafter| drafter.memory());
        self.backend.memory().and(drafter.unwrap_or_default())
    }

    /// The engine's backend.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    fn working(&mut self, slot: usize) -> Result<Working<'_, B>> {
        let sequence = found(&mut self.sequences, slot)?;
        Ok((&mut self.backend, self.method.drafter.as_deref_mut(), sequence))
    }
}

fn found(sequences: &mut [Option<Sequence>], slot: usize) -> Result<&mut Sequence> {
    sequences
        .get_mut(slot)
        .and_then(Option::as_mut)
        .ok_or_else(|| Error::usage(format!("slot {slot} holds no sequence"), "use a slot that add returned"))
}
