//! Sequences and rounds: the stateful part of the method.
//!
//! A round is `draft` then `verify` (docs/algorithm.md). The engine keeps each sequence's extent, its last emitted token
//! (whose keys and values are not cached yet), the γ policy and the statistics; the backend computes. There is no rollback:
//! tokens that `verify` does not commit are overwritten by the next round.

use crate::backend::{Backend, Memory, Turn};
use crate::draft::{Drafter, Outlook};
use crate::evaluate;
use crate::forward::{self, Chunk, PrefillCursor};
use crate::prompt_cache::PromptCache;
use crate::rope::RopeTable;
use quantspec_core::cache::{BUFFER_TOKENS, Extent, GAMMA_MAX, visible_pages, visible_quantised};
use quantspec_core::config::{Pages, View};
use quantspec_core::grammar::{Constraint, Grammar};
use quantspec_core::logprob::{self, Logprob};
use quantspec_core::page_pool::{PagePool, Prefix};
use quantspec_core::penalty::{self, History};
use quantspec_core::plan::pages;
use quantspec_core::policy::Policy;
use quantspec_core::report::{MethodCounters, Stats};
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

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

/// Tokens one sequence emitted in a round: the accepted drafted ones, then one chosen by the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// Sequence slot.
    pub slot: usize,
    /// Token ids in order, never empty.
    pub tokens: Vec<u32>,
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
    drafted: Option<(usize, f64)>,
    /// Pages of the cache that each step read; `None` if it read none.
    pages: Option<Pages>,
    stats: Stats,
    /// Memory of the backend before any text.
    loaded: Memory,
    prompts: Option<PromptCache>,
    rope: RopeTable,
}

impl<B: Backend> Engine<B> {
    /// An engine with `slots` sequences of up to `capacity` tokens each; prompts are processed in blocks of `block_rows`.
    pub fn new(backend: B, method: Method, slots: usize, capacity: usize, block_rows: usize) -> Engine<B> {
        Engine {
            loaded: backend.memory(),
            rope: RopeTable::new(backend.config()),
            backend,
            method: method.of_candidates(),
            capacity,
            block_rows,
            sequences: (0..slots).map(|_| None).collect(),
            turns: Vec::new(),
            drafted: None,
            pages: None,
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
        let vocab = self.backend.config().vocab;
        if prompt.is_empty() {
            return Err(Error::usage(
                "the prompt has 0 tokens",
                "give at least one token, for example the model's BOS",
            ));
        }
        forward::check_ids(prompt, vocab)?;
        if max_new_tokens == 0 {
            return Err(Error::usage("0 new tokens were requested", "ask for at least 1 with -n"));
        }
        let wanted = prompt.len().saturating_add(max_new_tokens);
        if wanted > self.capacity {
            return Err(Error::does_not_fit(
                format!(
                    "prompt of {} tokens and {max_new_tokens} new tokens exceed the capacity of {}",
                    prompt.len(),
                    self.capacity
                ),
                match (self.capacity.saturating_sub(max_new_tokens), self.capacity.saturating_sub(prompt.len())) {
                    (0, 0) => "open the engine for longer sequences".to_string(),
                    (0, new) => format!("ask for at most {new} new tokens"),
                    (length, 0) => format!("shorten the prompt to at most {length} tokens"),
                    (length, new) => {
                        format!("shorten the prompt to at most {length} tokens, or ask for at most {new} new ones")
                    }
                },
            ));
        }
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
        let mut computed = self.begin_prompt(slot)?;
        let (block_rows, most_rows) = (self.block_rows, most_rows.max(1));
        let ended = loop {
            let (backend, _, sequence) = self.working(slot)?;
            let Some(cursor) = &mut sequence.cursor else {
                return Err(Error::internal("a prompt that began has no cursor"));
            };
            match forward::prefill_chunk(backend, slot, &sequence.text, block_rows, cursor, most_rows, progress)? {
                Chunk::More => break false,
                Chunk::End => break true,
                Chunk::Damaged => {
                    let reuse = sequence.cursor.take().and_then(|mut cursor| cursor.take_reuse());
                    if let (Some(reuse), Some(prompts)) = (reuse, &mut self.prompts) {
                        prompts.forget(reuse);
                    }
                    computed = self.begin_prompt(slot)?;
                }
            }
        };
        let (backend, drafter, sequence) = self.working(slot)?;
        let tokens = sequence.text.len();
        let mut first = None;
        if ended {
            let logits = sequence.logprobs.map(|_| backend.logits(0)).transpose()?;
            let (history, constraint) = (sequence.history.clone(), sequence.constraint.clone());
            let turn = Turn { history, constraint, ..Turn::new(slot, tokens, 0, sequence.sampler.clone()) };
            let token = backend.first(&turn)?;
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
            first = Some(token);
        }
        sequence.prefill_s += started.elapsed().as_secs_f64();
        let seconds = sequence.prefill_s;
        if ended {
            let reuse = sequence.cursor.take().and_then(|mut cursor| cursor.take_reuse());
            if let (Some(reuse), Some(prompts)) = (reuse, &mut self.prompts) {
                prompts.keep(reuse);
            }
            self.stats.prefill(computed, tokens - computed, seconds);
        }
        Ok(first)
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
    /// is unfinished, and those of [`forward::prefill_chunk`], [`crate::backend::TokenSampler::first`], [`crate::backend::KvCache::set_window`] and
    /// [`Drafter::prefill`].
    pub fn prefill_timed(
        &mut self,
        slot: usize,
        from: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(u32, f64)> {
        let computed = self.begin_prompt(slot)?;
        let first = found(&mut self.sequences, slot)?.text.len() - computed;
        let (mut last, mut early_s, mut done) = (Instant::now(), 0.0, 0);
        let mut timed = |rows: usize, total: usize| {
            // Rows are counted over all layers. A call without new rows ends a layer, which involves all of its rows.
            let new = if rows > done { rows - done } else { computed };
            let end = first + (rows - 1) % computed + 1;
            let late = end.saturating_sub(from.max(end.saturating_sub(new)));
            early_s += last.elapsed().as_secs_f64() * (new - late) as f64 / new as f64;
            (last, done) = (Instant::now(), rows);
            progress(rows, total);
        };
        let first = self.prefill_chunk(slot, usize::MAX, &mut timed)?;
        let first = first.ok_or_else(|| Error::internal("a prefill without a bound did not end"))?;
        // `prefill_s` is the time that the statistics count, so the two agree.
        Ok((first, found(&mut self.sequences, slot)?.prefill_s - early_s))
    }

    /// Changes the method from the next round on; its drafter gets every sequence's text. The backend must keep all planes
    /// that the drafter needs.
    ///
    /// # Errors
    /// Those of [`Drafter::prefill`].
    pub fn set_method(&mut self, method: Method) -> Result<()> {
        self.method = method.of_candidates();
        let Some(drafter) = self.method.drafter.as_deref_mut() else { return Ok(()) };
        for (slot, sequence) in self.sequences.iter().enumerate() {
            if let Some((last, before)) =
                sequence.as_ref().filter(|one| one.running).and_then(|one| one.text.split_last())
            {
                drafter.prefill(slot, before, *last)?;
            }
        }
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

    /// γ for the slot's next round: the policy's, limited so that a round never emits more than the remaining tokens.
    pub fn choose_gamma(&self, slot: usize) -> usize {
        let remaining = self.sequences.get(slot).and_then(Option::as_ref).map_or(0, |sequence| sequence.remaining);
        let most = GAMMA_MAX.min(remaining.saturating_sub(1));
        let Method { drafter: Some(_), policy, .. } = &self.method else { return 0 };
        let drafted = if self.watches(slot) { policy.gamma_limit() } else { policy.gamma() };
        // In a batch a copy is at most as long as the other sequences' drafts.
        let longest_copy = if self.is_alone() { policy.gamma_max() } else { policy.gamma() };
        self.source(slot, drafted.min(most), longest_copy.min(most)).0
    }

    /// The source of the slot's next tokens, as their number and whether they are copied from its text: a copy of at most
    /// `longest_copy` tokens if the drafter expects it to pay, otherwise a draft of `drafted` tokens.
    fn source(&self, slot: usize, drafted: usize, longest_copy: usize) -> (usize, bool) {
        let Method { drafter, policy, .. } = &self.method;
        // Costs are known for a single sequence only: in a batch the other sequences' draft runs anyway.
        let alone = self.is_alone();
        let break_even = |gamma| policy.break_even(gamma).filter(|_| alone);
        match drafter.as_ref().map_or(0, |drafter| drafter.copies(slot, longest_copy, &break_even)) {
            0 => (drafted, false),
            copied => (copied, true),
        }
    }

    /// Returns true if one sequence is being decoded.
    fn is_alone(&self) -> bool {
        self.sequences.iter().flatten().filter(|sequence| sequence.running && sequence.remaining > 0).count() == 1
    }

    /// True if a draft of this slot can end early: logit margins predict acceptance, and no other sequence shares its steps.
    fn watches(&self, slot: usize) -> bool {
        let sampled = |sequence: &Sequence| sequence.sampler.accept != Accept::Rejection;
        self.method.drafter.as_ref().is_some_and(|drafter| drafter.margins())
            && self.sequences.get(slot).and_then(Option::as_ref).is_some_and(sampled)
            && self.is_alone()
    }

    /// Drafts γ tokens for every (slot, γ): fewer if the policy ends a draft early or the drafter proposes fewer. The round
    /// consists of these slots; if one is refused, there is no round.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if a slot holds no sequence, is not decoding or occurs twice, if γ is beyond
    /// [`GAMMA_MAX`] or the remaining tokens, and if the method drafts nothing and γ is not 0. Those of [`Drafter::propose`]
    /// and of [`forward::Executor::restore_drafts`].
    pub fn draft(&mut self, gammas: &[(usize, usize)]) -> Result<()> {
        let drafted = self.begin_round(gammas);
        if drafted.is_err() {
            self.turns.clear();
        }
        drafted
    }

    fn begin_round(&mut self, gammas: &[(usize, usize)]) -> Result<()> {
        self.turns.clear();
        self.drafted = None;
        for &(slot, gamma) in gammas {
            let turn = self.turn(slot, gamma)?;
            self.turns.push(turn);
        }
        self.observe_forecasts();
        match self.turns.iter().map(|turn| turn.gamma).max() {
            None | Some(0) => Ok(()),
            Some(steps) => self.propose(steps),
        }
    }

    /// A slot's part in the round that begins.
    fn turn(&mut self, slot: usize, gamma: usize) -> Result<Turn> {
        if self.turns.iter().any(|turn| turn.slot == slot) {
            return Err(Error::usage(format!("slot {slot} is named twice in a round"), "name every slot once"));
        }
        // γ may be the caller's own, so the source is chosen for it, whatever `choose_gamma` returned.
        let (tokens, copied) = self.source(slot, gamma, gamma);
        let stop = self.method.policy.stop().filter(|_| !copied && self.watches(slot));
        let (_, _, sequence) = self.working(slot)?;
        if !sequence.running || sequence.remaining == 0 {
            return Err(Error::usage(
                format!("slot {slot} is not decoding"),
                "name only slots that were prefilled and have tokens left to emit",
            ));
        }
        if gamma > GAMMA_MAX || gamma + 1 > sequence.remaining {
            return Err(Error::usage(
                format!("gamma {gamma} is out of range for slot {slot}, which may emit {} tokens", sequence.remaining),
                format!("use the value of choose_gamma, at most {GAMMA_MAX}"),
            ));
        }
        let committed = sequence.extent.committed();
        sequence.written = sequence.written.max(committed + gamma + 1);
        Ok(Turn {
            stop,
            history: sequence.history.clone(),
            constraint: sequence.constraint.clone(),
            reads_logits: sequence.logprobs.is_some(),
            copied,
            ..Turn::new(slot, committed, tokens, sequence.sampler.clone())
        })
    }

    /// Tells the policy what the drafter expects of its candidates at the round's lengths.
    fn observe_forecasts(&mut self) {
        let Method { target, drafter: Some(drafter), policy } = &mut self.method else { return };
        let (config, target, memory) = (self.backend.config(), *target, self.loaded);
        let (kv_heads, head_dim) = (config.layers * config.kv_heads, config.head_dim);
        let visible: Vec<usize> = self.turns.iter().map(|turn| visible_pages(turn.committed)).collect();
        let outlook = Outlook { kv_heads, head_dim, target, memory, visible: &visible };
        policy.observe_forecasts(&drafter.forecasts(&outlook, &policy.measured()));
    }

    /// Drafts the round's tokens, at most `steps` of a sequence.
    fn propose(&mut self, steps: usize) -> Result<()> {
        let Method { drafter, policy, .. } = &mut self.method;
        let Some(drafter) = drafter else {
            return Err(Error::usage(format!("gamma {steps} with method ar"), "method ar drafts nothing; use gamma 0"));
        };
        if drafter.needs().draft_weights {
            self.backend.restore_drafts()?;
        }
        let started = Instant::now();
        let proposed = drafter.propose(&mut self.backend, &mut self.turns, policy.candidate())?;
        (0..proposed.without_token).for_each(|_| policy.observe_failure());
        if proposed.steps > 0 {
            self.drafted = Some((proposed.steps, started.elapsed().as_secs_f64()));
        }
        self.pages = proposed.pages;
        self.stats.guessed(proposed.guessed.0, proposed.guessed.1);
        Ok(())
    }

    /// Verifies the tokens of the last `draft`, commits, quantises complete pages, and returns each sequence's new tokens in
    /// the order of that call. If the verification is not finite, or exceeds the limits of a grammar, it runs a plain step
    /// without the drafted tokens.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] without a preceding draft, those of the slots' grammars, and those of
    /// [`forward::verify`], [`forward::Executor::draft_seconds`], [`crate::backend::KvCache::window`],
    /// [`crate::backend::KvCache::flush`], [`crate::backend::KvCache::set_window`] and [`Drafter::commit`].
    pub fn verify(&mut self) -> Result<Vec<Emitted>> {
        let mut turns = std::mem::take(&mut self.turns);
        if turns.is_empty() {
            return Err(Error::usage("verify without draft", "call draft first, with gamma 0 for a plain step"));
        }
        let drafted: Vec<usize> = turns.iter().map(|turn| turn.gamma).collect();
        let (verdicts, started) = self.verdicts(&mut turns)?;
        let mut draft_s = 0.0;
        if let Some((steps, seconds)) = self.drafted.take() {
            // A backend that ran the draft with the verification reports the draft's share of the time.
            draft_s = self.backend.draft_seconds()?.unwrap_or(0.0);
            self.method.policy.observe_draft(seconds + draft_s, steps);
            self.stats.draft(seconds + draft_s);
        }
        // The text grows in place, so no turn may hold a reference.
        turns.iter_mut().for_each(|turn| turn.history = None);
        let (mut round, mut row, mut logprobs_s) = (Vec::with_capacity(turns.len()), 0, 0.0);
        for ((turn, verdict), drafted) in turns.iter().zip(verdicts).zip(drafted) {
            let (tokens, seconds) = self.commit(turn, &verdict, row)?;
            (row, logprobs_s) = (row + turn.gamma + 1, logprobs_s + seconds);
            self.account(turn, &verdict, drafted);
            round.push(Emitted { slot: turn.slot, tokens });
        }
        let seconds = started.elapsed().as_secs_f64() - draft_s - logprobs_s;
        self.method.policy.observe_verify(row, seconds);
        self.stats.verify(seconds);
        Ok(round)
    }

    /// The verdicts of a round, and when their verification began. Turns of a round that is repeated have γ = 0.
    fn verdicts(&mut self, turns: &mut [Turn]) -> Result<(Vec<Verdict>, Instant)> {
        let started = Instant::now();
        let target = self.method.target;
        match forward::verify(&mut self.backend, target, turns) {
            // Plain decoding may never feed these drafted tokens, so their non-finite values must not end the text.
            Err(error) if error.kind.is_of_tokens() && turns.iter().any(|turn| turn.gamma > 0) => {
                let failed_s = started.elapsed().as_secs_f64();
                let drafted = self.drafted.take();
                self.stats.draft(drafted.map_or(0.0, |(_, seconds)| seconds) + failed_s);
                if let Some((steps, seconds)) = drafted {
                    self.method.policy.observe_draft(seconds + failed_s, steps);
                }
                for turn in turns.iter_mut().filter(|turn| turn.gamma > 0) {
                    turn.gamma = 0;
                    if !turn.copied {
                        self.method.policy.observe_failure();
                    }
                }
                let started = Instant::now();
                Ok((forward::verify(&mut self.backend, target, turns)?, started))
            }
            verdicts => Ok((verdicts?, started)),
        }
    }

    /// Commits a sequence's new tokens, and returns them and the seconds spent on log-probabilities. `row`: its first row in
    /// the verification.
    fn commit(&mut self, turn: &Turn, verdict: &Verdict, row: usize) -> Result<(Vec<u32>, f64)> {
        let (backend, drafter, sequence) = self.working(turn.slot)?;
        let mut tokens = backend.window(turn.slot, verdict.accepted + 1)?.split_off(1);
        tokens.push(verdict.token);
        let mut logprobs_s = 0.0;
        if let Some(top) = sequence.logprobs {
            let began = Instant::now();
            for (i, &token) in tokens.iter().enumerate() {
                sequence.token_logprobs.push(logprob::of(&backend.logits(row + i)?, token, top));
            }
            logprobs_s = began.elapsed().as_secs_f64();
        }
        for page in sequence.extent.commit(verdict.accepted + 1) {
            backend.flush(turn.slot, page)?;
        }
        backend.set_window(turn.slot, &[verdict.token])?;
        if let Some(drafter) = drafter {
            drafter.commit(turn.slot, &tokens)?;
        }
        sequence.emit(&tokens);
        sequence.remaining -= tokens.len();
        Ok((tokens, logprobs_s))
    }

    /// Reports a sequence's part of a round to statistics and policy. `drafted`: tokens before a repetition of the round, which
    /// accepts none of them.
    fn account(&mut self, turn: &Turn, verdict: &Verdict, drafted: usize) {
        let Some(sequence) = self.sequences.get(turn.slot).and_then(Option::as_ref) else { return };
        let of_prompt = visible_pages(sequence.prompt_tokens);
        self.stats.round(drafted, verdict.accepted);
        if turn.copied {
            self.stats.copied(drafted);
        }
        let read = match self.pages.filter(|_| !turn.copied) {
            None => 0,
            Some(pages) => pages.read(of_prompt, visible_pages(turn.committed)),
        };
        self.stats.pages(drafted * read);
        let Method { drafter, policy, .. } = &mut self.method;
        if let Some(name) = drafter.as_ref().and_then(|drafter| drafter.method(policy.candidate())) {
            let name = if turn.copied { "ngram" } else { [name, "ar"][usize::from(drafted == 0)] };
            let (accepted_tokens, drafted_pages) = (verdict.accepted, drafted * read);
            let counters = MethodCounters { rounds: 1, drafted_tokens: drafted, accepted_tokens, drafted_pages };
            self.stats.method(name, counters);
        }
        if turn.gamma > 0 {
            if !turn.margins.is_empty() {
                policy.observe_margins(&turn.margins, verdict.accepted);
            }
            match turn.copied {
                true => policy.observe_copied(turn.gamma, verdict.accepted),
                false => policy.observe_round(turn.gamma, verdict.accepted),
            }
        }
    }

    /// [`evaluate::score`] of a text under the target's view, in a free slot, between two rounds.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] if no slot or too few pages are free, [`quantspec_core::ErrorKind::DoesNotFit`]
    /// beyond the capacity, and those of [`evaluate::score`].
    pub fn score(&mut self, tokens: &[u32], step_rows: usize) -> Result<Vec<f64>> {
        if tokens.len() > self.capacity {
            return Err(Error::does_not_fit(
                format!("a text of {} tokens exceeds the capacity of {}", tokens.len(), self.capacity),
                "shorten the text, or open the engine for longer sequences",
            ));
        }
        let slot = self.free_slot()?;
        self.check_room(tokens.len(), None)?;
        evaluate::score(&mut self.backend, self.method.target, slot, tokens, step_rows)
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
