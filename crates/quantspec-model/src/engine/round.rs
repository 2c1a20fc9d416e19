//! Rounds: γ and the source of each sequence's tokens, draft, verification, commit, and reports to policy and statistics.

use super::{Emitted, Engine, Method, Sequence};
use crate::backend::{Backend, Turn};
use crate::draft::Outlook;
use crate::forward;
use quantspec_core::cache::{GAMMA_MAX, visible_pages};
use quantspec_core::forecast::forecasts;
use quantspec_core::logprob;
use quantspec_core::sample::{Accept, warp};
use quantspec_core::stats::MethodCounters;
use quantspec_core::verify::{DraftDistribution, Verdict, judge_up_to_failure};
use quantspec_core::{Error, ErrorKind, Result};
use std::slice;
use std::time::Instant;

impl<B: Backend> Engine<B> {
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

    /// The number of tokens to propose for the slot, and whether they are copied from its text: a copy of at most `longest_copy`
    /// tokens if the drafter expects it to pay, otherwise a draft of `drafted` tokens.
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
    /// [`GAMMA_MAX`] or the remaining tokens, and if the method drafts nothing and γ is not 0. Those of
    /// [`crate::draft::Drafter::propose`] and of [`forward::Executor::restore_drafts`].
    pub fn draft(&mut self, gammas: &[(usize, usize)]) -> Result<()> {
        let drafted = self.begin_round(gammas);
        if drafted.is_err() {
            self.turns.clear();
        }
        drafted
    }

    fn begin_round(&mut self, gammas: &[(usize, usize)]) -> Result<()> {
        self.turns.clear();
        self.draft_time = None;
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

    /// Passes priors and forecasts of the drafter's candidates, at the round's lengths, to the policy.
    fn observe_forecasts(&mut self) {
        let Method { target, drafter: Some(drafter), policy } = &mut self.method else { return };
        let (config, target) = (self.backend.config(), *target);
        let (kv_heads, head_dim) = (config.layers * config.kv_heads, config.head_dim);
        let visible: Vec<usize> = self.turns.iter().map(|turn| visible_pages(turn.committed)).collect();
        let (weights_bytes, draft_read_bytes) = (self.loaded.weights_bytes, self.draft_read_bytes);
        let outlook = Outlook { kv_heads, head_dim, target, weights_bytes, draft_read_bytes, visible: &visible };
        let priors = drafter.priors(&outlook);
        policy.observe_forecasts(&forecasts(&drafter.usable(&outlook), &priors, &policy.measured()), &priors);
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
            self.draft_time = Some((proposed.steps, started.elapsed().as_secs_f64()));
        }
        self.pages_read = proposed.pages;
        self.stats.guessed(proposed.guessed.0, proposed.guessed.1);
        Ok(())
    }

    /// Verifies the tokens of the last `draft`, commits, quantises complete pages, and returns each sequence's new tokens in
    /// the order of that call. If the verification is not finite, exceeds the limits of a grammar, or has no token left, it
    /// is repeated without drafted tokens that may be the cause.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Usage`] without a preceding draft, those of the slots' grammars, and those of
    /// [`forward::verify`], [`forward::Executor::device_seconds`], [`crate::backend::KvCache::window`],
    /// [`crate::backend::KvCache::flush`], [`crate::backend::KvCache::set_window`] and [`crate::draft::Drafter::commit`].
    pub fn verify(&mut self) -> Result<Vec<Emitted>> {
        let mut turns = std::mem::take(&mut self.turns);
        if turns.is_empty() {
            return Err(Error::usage("verify without draft", "call draft first, with gamma 0 for a plain step"));
        }
        let drafted: Vec<usize> = turns.iter().map(|turn| turn.gamma).collect();
        let (verdicts, started) = self.verdicts(&mut turns)?;
        let (ran_s, device) = (started.elapsed().as_secs_f64(), self.backend.device_seconds()?);
        // A device may have run the draft with the verification.
        let draft_s = device.map_or(0.0, |device| device.drafting);
        if let Some((steps, seconds)) = self.draft_time.take() {
            self.method.policy.observe_draft(seconds + draft_s, steps);
            self.stats.draft(seconds + draft_s);
        }
        // The text grows in place, so no turn may hold a reference.
        turns.iter_mut().for_each(|turn| turn.history = None);
        let (mut round, mut row, mut logprobs_s) = (Vec::with_capacity(turns.len()), 0, 0.0);
        for ((turn, verdict), drafted) in turns.iter().zip(verdicts).zip(drafted) {
            let (emitted, seconds) = self.commit(turn, &verdict, row)?;
            (row, logprobs_s) = (row + turn.gamma + 1, logprobs_s + seconds);
            self.account(turn, &verdict, drafted);
            round.push(emitted);
        }
        let committed_s = started.elapsed().as_secs_f64() - ran_s - logprobs_s;
        // The policy counts the device's seconds: while a kind of round is new, the host takes longer.
        let verified_s = device.map_or(ran_s, |device| device.verification);
        self.method.policy.observe_verify(row, verified_s + committed_s);
        self.stats.verify(ran_s - draft_s + committed_s);
        Ok(round)
    }

    /// The verdicts of a round, and when their verification began. If drafted tokens make it fail, it is repeated without them:
    /// γ becomes smaller.
    fn verdicts(&mut self, turns: &mut [Turn]) -> Result<(Vec<Verdict>, Instant)> {
        let started = Instant::now();
        let target = self.method.target;
        match forward::verify(&mut self.backend, target, turns) {
            // Plain decoding may never feed these drafted tokens, so their non-finite values must not end the text.
            Err(error) if error.kind.is_of_tokens() && turns.iter().any(|turn| turn.gamma > 0) => {
                let failed_s = started.elapsed().as_secs_f64();
                let drafted = self.draft_time.take();
                self.stats.draft(drafted.map_or(0.0, |(_, seconds)| seconds) + failed_s);
                if let Some((steps, seconds)) = drafted {
                    self.method.policy.observe_draft(seconds + failed_s, steps);
                }
                let mut found = vec![None; turns.len()];
                for (turn, found) in turns.iter_mut().zip(&mut found).filter(|(turn, _)| turn.gamma > 0) {
                    if !turn.copied {
                        self.method.policy.observe_failure();
                    }
                    match turn.sampler.accept {
                        Accept::Greedy | Accept::Replay => turn.gamma = 0,
                        Accept::Rejection => *found = self.end_at_failure(turn)?,
                    }
                }
                let started = Instant::now();
                let verdicts = forward::verify(&mut self.backend, target, turns)?;
                Ok((
                    found.into_iter().zip(verdicts).map(|(found, verdict)| found.unwrap_or(verdict)).collect(),
                    started,
                ))
            }
            verdicts => Ok((verdicts?, started)),
        }
    }

    /// Ends a draft for rejection before the first row that fails, and returns the verdict on its tokens; `None` if no row
    /// fails. Drawing a token in place of the drafted ones would make texts that lead to a failure less likely.
    fn end_at_failure(&mut self, turn: &mut Turn) -> Result<Option<Verdict>> {
        let (slot, target) = (turn.slot, self.method.target);
        // The failed round has drafted them.
        turn.to_draft = None;
        let mut drafted = self.backend.window(slot, turn.gamma + 1)?.split_off(1);
        let mut q = Vec::with_capacity(drafted.len());
        for (offset, &token) in drafted.iter().enumerate() {
            q.push(match turn.q {
                DraftDistribution::Kept => match self.backend.draft_probabilities(slot, offset, &turn.sampler) {
                    // The tokens before this one decide whether it is drawn from NaN.
                    Err(error) if error.kind == ErrorKind::NotFinite => break,
                    q => q?,
                },
                DraftDistribution::OneHot => {
                    let mut q = vec![0.0; self.backend.config().vocab];
                    q[token as usize] = 1.0;
                    q
                }
            });
        }
        drafted.truncate(q.len());
        for gamma in 0..=drafted.len() {
            turn.gamma = gamma;
            match forward::verify(&mut self.backend, target, slice::from_ref(turn)) {
                Err(error) if error.kind.is_of_tokens() && gamma > 0 => {
                    // Rows before the one that fails; the pass that failed may have left no logits.
                    (turn.gamma, turn.reads_logits) = (gamma - 1, true);
                    forward::verify(&mut self.backend, target, slice::from_ref(turn))?;
                    let p = (0..gamma).map(|row| {
                        let logits = self.backend.logits(row)?;
                        Ok(warp(&turn.allowed(&logits, &drafted[..row])?, &turn.sampler))
                    });
                    let p = p.collect::<Result<Vec<_>>>()?;
                    let first = turn.committed + 1;
                    return judge_up_to_failure(&drafted[..gamma], &q[..gamma], &p, &turn.sampler, first).map(Some);
                }
                verdicts => verdicts?,
            };
        }
        Ok(None)
    }

    /// Commits a sequence's new tokens, and returns them and the seconds spent on log-probabilities. `row`: its first row in
    /// the verification.
    fn commit(&mut self, turn: &Turn, verdict: &Verdict, row: usize) -> Result<(Emitted, f64)> {
        let (backend, drafter, sequence) = self.working(turn.slot)?;
        let drafted = backend.window(turn.slot, turn.gamma + 1)?.split_off(1);
        let mut tokens = drafted[..verdict.accepted].to_vec();
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
        Ok((Emitted { slot: turn.slot, tokens, drafted }, logprobs_s))
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
        let read = match self.pages_read.filter(|_| !turn.copied) {
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
}
