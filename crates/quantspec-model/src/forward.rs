//! The forward pass and the steps of a round. Every backend runs this code.
//!
//! ```text
//! round    draft ──┬─> RoundSteps ─> Executor::run ─> steps ─> step ─┬─> layer ─> operations of Network
//!          verify ─┘                                                 │
//! prompt   prefill_chunk ────────────────────────────────────────────┘
//! ```
//!
//! A backend implements the operations ([`Network`], [`TokenSampler`]). It may run [`RoundSteps`] in its own way ([`Executor`]):
//! as the steps below, one after another, or as a recorded graph of them.

use crate::kv_cache::KvCache;
use crate::network::{Block, Branch, DraftConfig, Network, Pass, Row, Step};
use crate::prompt_cache::Reuse;
use crate::prompt_rows::PromptRows;
use crate::sampler::{TokenSampler, Turn};
use quantspec_core::cache::G;
use quantspec_core::config::{Pages, Sensitive, View, Weights};
use quantspec_core::verify::Verdict;
use quantspec_core::{Error, Result};
use std::ops::Range;
use std::slice;

/// One decoder layer. `matrices` has a pass for each kind of matrices, in the order of [`Sensitive::KINDS`]; it differs from
/// `pass` at most in the weights. With tensor parallelism each device would hold a partial sum before
/// [`Network::reduce_residual`], and the all-reduce would belong there.
fn layer<B: Network>(
    backend: &mut B,
    layer: usize,
    pass: &Pass,
    matrices: [&Pass; Sensitive::KINDS.len()],
) -> Result<()> {
    let [qkv, output, gate_up, down] = matrices;
    backend.qkv(layer, qkv)?;
    backend.poll()?;
    backend.attend(layer, pass)?;
    backend.poll()?;
    backend.output(layer, output)?;
    backend.reduce_residual(layer, Branch::Attention, pass)?;
    backend.poll()?;
    backend.gate_up(layer, gate_up)?;
    backend.poll()?;
    backend.down(layer, down)?;
    backend.reduce_residual(layer, Branch::Mlp, pass)?;
    backend.poll()
}

/// Runs a step up to its logits.
///
/// # Errors
/// Those of the backend's operations from [`Network::embed`] to [`Network::head`], and of [`Network::poll`].
pub fn step<B: Network>(backend: &mut B, step: &Step) -> Result<()> {
    step_but_one(backend, step, None)
}

/// As [`step`], but one matrix, `exact` = (layer, index in [`Sensitive::KINDS`]), is read with the target's weights. Not on a
/// GPU, where the format in which operations of a draft step hand over rows depends on the weights.
///
/// # Errors
/// As [`step`].
pub fn step_but_one<B: Network>(backend: &mut B, step: &Step, exact: Option<(usize, usize)>) -> Result<()> {
    let full = Step { weights: Weights::Full, ..*step };
    let (pass, exact_pass) = (Pass::Step(step), Pass::Step(&full));
    backend.embed(&pass)?;
    for index in 0..backend.config().layers {
        let of = |kind: usize| if exact == Some((index, kind)) { &exact_pass } else { &pass };
        layer(backend, index, &pass, [of(0), of(1), of(2), of(3)])?;
    }
    backend.head(&pass)
}

/// Rows restored from the prompt cache that count as one computed row towards the limit of a chunk. Restoring them takes at
/// most as long as computing that row.
const RESTORED_PER_ROW: usize = 32;

/// Progress of a prompt: finished layers, and rows of the current one.
#[derive(Debug, Default)]
pub struct PrefillCursor {
    embedded: bool,
    layer: usize,
    row: usize,
    /// Rows restored from the prompt cache, and rows to record for it.
    reuse: Option<Reuse>,
}

impl PrefillCursor {
    /// Start of a prompt of which the prompt cache holds some rows.
    pub fn reusing(reuse: Reuse) -> PrefillCursor {
        PrefillCursor { reuse: Some(reuse), ..PrefillCursor::default() }
    }

    /// The first row that is computed.
    pub fn first(&self) -> usize {
        self.reuse.as_ref().map_or(0, Reuse::tokens)
    }

    /// Takes the restored and recorded rows.
    pub fn take_reuse(&mut self) -> Option<Reuse> {
        self.reuse.take()
    }
}

/// Where a call of [`prefill_chunk`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// The prompt continues with the next call.
    More,
    /// It has been read.
    End,
    /// Restored rows are damaged; the caller must restart the prompt.
    Damaged,
}

/// Runs a whole prompt without a prompt cache; see [`prefill_chunk`].
///
/// # Errors
/// As [`prefill_chunk`].
pub fn prefill<B: Network + PromptRows>(
    backend: &mut B,
    slot: usize,
    prompt: &[u32],
    block_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    prefill_chunk(backend, slot, prompt, block_rows, &mut PrefillCursor::default(), usize::MAX, progress).map(|_| ())
}

/// Runs a prompt layer by layer in blocks of `block_rows`, and leaves the logits of the last row.
///
/// Layer-major order keeps full-precision keys and values of one layer at a time. In the last layer only the rows of the last
/// page are computed beyond their keys and values, because nothing reads the hidden states of the others. The call stops after
/// `most_rows` rows, counted over all layers; the next call continues at the cursor. Steps of other slots may run in between
/// without affecting a bit. Rows known to the cursor's [`Reuse`] are restored, except the prompt's last row. `progress` is
/// called with the computed rows, counted over all layers, after each block and each layer.
///
/// # Errors
/// Those of the operations of [`step`], of [`Network::store`], of [`Network::end_chunk`], and of [`Reuse`].
pub fn prefill_chunk<B: Network + PromptRows>(
    backend: &mut B,
    slot: usize,
    prompt: &[u32],
    block_rows: usize,
    cursor: &mut PrefillCursor,
    most_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Chunk> {
    let (layers, first) = (backend.config().layers, cursor.first());
    let computed = prompt.len() - first;
    // The first row of the last page, or the first computed row if that is later.
    let last_page = first.max(prompt.len().saturating_sub(1) / G * G);
    let block = |start: usize, end: usize| Block { slot, prompt, first, start, rows: block_rows.min(end - start) };
    if !cursor.embedded {
        for start in (first..prompt.len()).step_by(block_rows) {
            backend.embed(&Pass::Prefill(block(start, prompt.len())))?;
            backend.poll()?;
        }
        (cursor.embedded, cursor.row) = (true, first);
    }
    let mut processed = 0;
    while cursor.layer < layers {
        if processed >= most_rows {
            backend.end_chunk()?;
            return Ok(Chunk::More);
        }
        if cursor.row == first
            && let Some(reuse) = &mut cursor.reuse
            && !reuse.restore(backend, cursor.layer)?
        {
            return Ok(Chunk::Damaged);
        }
        let whole = cursor.layer + 1 < layers || cursor.row >= last_page;
        let next = block(cursor.row, if whole { prompt.len() } else { last_page });
        let pass = Pass::Prefill(next);
        if whole {
            layer(backend, cursor.layer, &pass, [&pass; Sensitive::KINDS.len()])?;
        } else {
            backend.qkv(cursor.layer, &pass)?;
            backend.poll()?;
        }
        processed += next.rows + if cursor.row == first { first / RESTORED_PER_ROW } else { 0 };
        cursor.row += next.rows;
        progress(cursor.layer * computed + cursor.row - first, layers * computed);
        if cursor.row == prompt.len() {
            if let Some(reuse) = &mut cursor.reuse {
                reuse.record(backend, cursor.layer)?;
            }
            backend.store(cursor.layer, slot, prompt.len())?;
            backend.poll()?;
            (cursor.layer, cursor.row) = (cursor.layer + 1, first);
            progress(cursor.layer * computed, layers * computed);
        }
    }
    if let Some(last) = prompt.len().checked_sub(1) {
        backend.head(&Pass::Prefill(block(last, prompt.len())))?;
    }
    Ok(Chunk::End)
}

/// Steps of a round that run together: its draft steps, then the verification. If the host reads each drafted token, every
/// draft step runs alone, and so does the verification.
#[derive(Clone, Debug)]
pub struct RoundSteps<'a> {
    /// What each sequence does.
    pub turns: &'a [Turn],
    /// Draft steps: their configuration and their rows.
    drafts: Vec<(DraftConfig, Vec<Row>)>,
    /// The verification: the target view and its rows.
    verification: Option<(View, Vec<Row>)>,
}

impl<'a> RoundSteps<'a> {
    /// One draft step, which has the rows at `offsets[i]` of turn i's window. `None` if all are empty.
    pub fn of_draft(config: &DraftConfig, turns: &'a [Turn], offsets: &[Range<usize>]) -> Option<RoundSteps<'a>> {
        let rows = turns.iter().zip(offsets).flat_map(|(turn, own)| own.clone().map(|offset| row(turn, offset)));
        let rows: Vec<Row> = rows.collect();
        (!rows.is_empty()).then(|| RoundSteps { turns, drafts: vec![(*config, rows)], verification: None })
    }

    /// The verification of every turn's window over the target view, preceded by the draft steps that [`draft`] deferred.
    pub fn of_verification(view: View, turns: &'a [Turn]) -> RoundSteps<'a> {
        let config = turns.iter().find_map(|turn| turn.to_draft);
        let left = |offset: usize| draft_rows(turns.iter().filter(|turn| turn.to_draft.is_some()), offset);
        let steps = (0..).map(left).take_while(|rows| !rows.is_empty());
        let drafts = config.map_or_else(Vec::new, |config| steps.map(|rows| (config, rows)).collect());
        RoundSteps { turns, drafts, verification: Some((view, verify_rows(turns))) }
    }

    /// The draft steps, in order. The first step of a window chooses the pages.
    pub fn drafts(&self) -> impl Iterator<Item = Step<'_>> {
        self.drafts.iter().map(|(DraftConfig { weights, view, pages }, rows)| Step {
            weights: *weights,
            view: *view,
            pages: *pages,
            choose_pages: rows.first().is_some_and(|row| row.offset == 0),
            rows,
        })
    }

    /// The verification: the target's weights over the target view.
    pub fn verification(&self) -> Option<Step<'_>> {
        let (view, rows) = self.verification.as_ref()?;
        Some(Step { weights: Weights::Full, view: *view, pages: Pages::All, choose_pages: false, rows })
    }
}

fn row(turn: &Turn, offset: usize) -> Row {
    Row { slot: turn.slot, offset, position: turn.committed + offset }
}

/// Rows of a draft step: one for each turn that drafts at this offset.
fn draft_rows<'a>(turns: impl Iterator<Item = &'a Turn>, offset: usize) -> Vec<Row> {
    turns.filter(|turn| turn.drafts(offset)).map(|turn| row(turn, offset)).collect()
}

/// Rows of a verification: `[last, g_0 … g_{γ−1}]` of every turn.
fn verify_rows(turns: &[Turn]) -> Vec<Row> {
    turns.iter().flat_map(|turn| (0..=turn.gamma).map(|offset| row(turn, offset))).collect()
}

/// Seconds of a round on its device, without what the host does in the meantime, such as recording a graph.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSeconds {
    /// Draft steps of the same round.
    pub drafting: f64,
    /// Verification and verdicts.
    pub verification: f64,
}

/// Runs the steps of rounds. The provided methods run them one after another.
pub trait Executor: Network + TokenSampler {
    /// Returns true if a whole round takes less time than its single steps. [`draft`] then defers unwatched drafts to
    /// [`verify`].
    fn runs_rounds_whole(&self) -> bool {
        false
    }

    /// Restores the draft weights if a prompt has taken their memory. [`Executor::run`] does so, too; after a separate call a
    /// draft's time does not include it.
    ///
    /// # Errors
    /// Device errors of a GPU. The provided method has none.
    fn restore_drafts(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs steps that belong together. Returns one verdict per turn, in order, if the verification is among them.
    ///
    /// # Errors
    /// Those of [`run_steps`].
    fn run(&mut self, round: &RoundSteps) -> Result<Vec<Verdict>>
    where
        Self: Sized,
    {
        run_steps(self, round)
    }

    /// Seconds that a device took for the round of the last verification; `None` if the host computed it.
    ///
    /// # Errors
    /// Device errors while reading a GPU's timer. The provided method has none.
    fn device_seconds(&mut self) -> Result<Option<DeviceSeconds>> {
        Ok(None)
    }
}

/// Runs the steps of a round one after another.
///
/// # Errors
/// Those of [`steps`] and [`TokenSampler::judge`].
pub fn run_steps<B: Network + TokenSampler>(backend: &mut B, round: &RoundSteps) -> Result<Vec<Verdict>> {
    steps(backend, round, |_| Ok(()))?;
    round.verification().map_or(Ok(Vec::new()), |window| backend.judge(&window, round.turns))
}

/// Runs the draft steps of a round, then `drafted`, then its verification up to the logits.
///
/// # Errors
/// Those of [`step`], [`TokenSampler::propose`] and `drafted`.
pub fn steps<B: Network + TokenSampler>(
    backend: &mut B,
    round: &RoundSteps,
    drafted: impl FnOnce(&mut B) -> Result<()>,
) -> Result<()> {
    for next in round.drafts() {
        step(backend, &next)?;
        backend.propose(&next, round.turns)?;
    }
    drafted(backend)?;
    round.verification().map_or(Ok(()), |window| step(backend, &window))
}

/// Drafts γ tokens per turn: step i feeds offset i of every turn with γ > i.
///
/// A draft is *watched* if the host reads the logit margin of every token: that of a single turn with a [`Turn::stop`], which
/// ends once acceptance of all its tokens is unlikely enough. If the backend runs rounds whole, other drafts are deferred to
/// [`verify`] ([`Turn::to_draft`]), unless a grammar needs each token to mask the next.
///
/// # Errors
/// Those of [`Network::poll`], [`Executor::run`] and [`TokenSampler::margin`]. Errors
/// [of tokens](quantspec_core::ErrorKind::is_of_tokens) are not among them: they end the draft.
pub fn draft<B: Executor + KvCache>(backend: &mut B, config: &DraftConfig, turns: &mut [Turn]) -> Result<()> {
    let masked = turns.iter().any(|turn| turn.constraint.is_some());
    if backend.runs_rounds_whole() && !masked && !is_watched(turns) {
        turns.iter_mut().filter(|turn| !turn.copied).for_each(|turn| turn.to_draft = Some(*config));
        return Ok(());
    }
    draft_now(backend, config, turns, None)
}

/// Returns true if the draft is watched ([`draft`]).
fn is_watched(turns: &[Turn]) -> bool {
    matches!(turns, [turn] if turn.stop.is_some())
}

/// Guesses what a draft network will choose, for less than a step of it (docs/design/levels.md). A wrong guess costs time and
/// changes no drafted token.
pub trait Guess {
    /// Up to `most` (at least one) tokens that may follow the slot's last one: the last emitted or chosen.
    fn guess(&mut self, slot: usize, most: usize) -> Vec<u32>;

    /// The network drafted `tokens`, of which all but the last had been guessed among `guessed` ones. Those after the end of a
    /// watched draft are not among them.
    fn chosen(&mut self, slot: usize, guessed: usize, tokens: &[u32]);
}

/// As [`draft`], but never deferred: all tokens are in the windows on return.
///
/// A step has one row per turn, and with `guesses` a further row for each guessed token. Row i of a turn yields the network's
/// choice after i guesses. So the choices count as drafted up to the first that differs from its guess.
///
/// # Errors
/// As [`draft`], and with guesses those of [`crate::kv_cache::KvCache`]'s windows.
pub fn draft_now<B: Executor + KvCache>(
    backend: &mut B,
    config: &DraftConfig,
    turns: &mut [Turn],
    mut guesses: Option<&mut dyn Guess>,
) -> Result<()> {
    backend.poll()?;
    let watched = is_watched(turns);
    // Tokens that each turn has drafted.
    let mut drafted = vec![0; turns.len()];
    loop {
        let (mut offsets, mut guessed) = (Vec::with_capacity(turns.len()), Vec::with_capacity(turns.len()));
        for (turn, &at) in turns.iter().zip(&drafted) {
            let left = if turn.drafts(at) { turn.gamma - at } else { 0 };
            let guess = match &mut guesses {
                Some(guesses) if left > 1 => guesses.guess(turn.slot, left - 1),
                _ => Vec::new(),
            };
            if !guess.is_empty() {
                let window = backend.window(turn.slot, at + 1)?;
                backend.set_window(turn.slot, &[&window[..], &guess].concat())?;
            }
            offsets.push(at..at + left.min(guess.len() + 1));
            guessed.push(guess);
        }
        let Some(round) = RoundSteps::of_draft(config, turns, &offsets) else { break };
        match backend.run(&round) {
            // Perhaps of a guess: the step is repeated without any.
            Err(error) if error.kind.is_of_tokens() && guessed.iter().any(|guess| !guess.is_empty()) => {
                guesses = None;
                continue;
            }
            // A failure of a draft affects neither the text nor the drafts of other turns. The tokens drafted before it are
            // verified, and their rows overwrite the draft's.
            Err(error) if error.kind.is_of_tokens() => {
                let drafting = |own: &Range<usize>| own.start < own.end;
                let several = offsets.iter().filter(|own| drafting(own)).count() > 1;
                for (turn, own) in turns.iter_mut().zip(&mut offsets).filter(|(_, own)| drafting(own)) {
                    let alone = RoundSteps::of_draft(config, slice::from_ref(turn), slice::from_ref(own));
                    let fails = match alone.filter(|_| several).map(|step| backend.run(&step)) {
                        Some(Err(error)) if !error.kind.is_of_tokens() => return Err(error),
                        Some(result) => result.is_err(),
                        None => true,
                    };
                    if fails {
                        (turn.gamma, own.end) = (own.start, own.start);
                    }
                }
            }
            result => _ = result?,
        };
        for (((turn, at), own), guess) in turns.iter_mut().zip(&mut drafted).zip(offsets).zip(guessed) {
            let (mut new, mut chosen) = (own.len().min(1), Vec::new());
            if guesses.is_some() && new > 0 {
                chosen = backend.window(turn.slot, own.end + 1)?.split_off(own.start + 1);
                new += guess.iter().zip(&chosen).take_while(|(guess, chosen)| guess == chosen).count();
            }
            for offset in (*at..*at + new).filter(|_| watched) {
                // A token drafted in the same step as one that ended the draft does not count.
                if turn.gamma > offset {
                    turn.drafted(backend.margin(turn.slot, offset)?);
                }
            }
            new = new.min(turn.gamma - *at);
            if let (Some(guesses), true) = (&mut guesses, new > 0) {
                guesses.chosen(turn.slot, guess.len(), &chosen[..new]);
            }
            *at += new;
        }
    }
    Ok(())
}

/// Verifies `[last, g_0 … g_{γ−1}]` of every turn in one pass of the target's weights over the target view.
///
/// # Errors
/// Those of [`Network::poll`] and of [`Executor::run`].
pub fn verify<B: Executor>(backend: &mut B, view: View, turns: &[Turn]) -> Result<Vec<Verdict>> {
    backend.poll()?;
    backend.run(&RoundSteps::of_verification(view, turns))
}

/// Refuses token ids outside the vocabulary.
pub(crate) fn check_ids(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&id| id as usize >= vocab) {
        None => Ok(()),
        Some(id) => Err(Error::model(
            format!("token id {id} is outside the model's vocabulary of {vocab}"),
            "the tokenizer belongs to another model; use the tokenizer.json published with these weights",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::sample::Sampler;

    const CONFIG: DraftConfig = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::Best(4) };

    fn rows(step: &Step) -> Vec<(usize, usize, usize)> {
        step.rows.iter().map(|row| (row.slot, row.offset, row.position)).collect()
    }

    #[test]
    fn a_round_has_the_rows_of_its_turns() {
        let turn = |slot, committed, gamma| Turn::new(slot, committed, gamma, Sampler::greedy());
        let mut turns = [turn(4, 100, 2), turn(1, 7, 0), turn(2, 300, 1)];
        let window = [(4, 0, 100), (4, 1, 101), (4, 2, 102), (1, 0, 7), (2, 0, 300), (2, 1, 301)];
        let drafted = [vec![(4, 0, 100), (2, 0, 300)], vec![(4, 1, 101)]];

        for (offset, rows_of) in drafted.iter().enumerate() {
            let offsets = turns.each_ref().map(|turn| offset..turn.gamma.min(offset + 1));
            let round = RoundSteps::of_draft(&CONFIG, &turns, &offsets).unwrap();
            let steps: Vec<Step> = round.drafts().collect();
            assert_eq!((steps.len(), rows(&steps[0]), steps[0].choose_pages), (1, rows_of.clone(), offset == 0));
            assert!(round.verification().is_none());
        }
        assert!(RoundSteps::of_draft(&CONFIG, &turns, &[2..2, 0..0, 1..1]).is_none());

        // Tokens that are in the windows are verified without draft steps.
        let round = RoundSteps::of_verification(View::Both, &turns);
        assert_eq!((round.drafts().count(), rows(&round.verification().unwrap())), (0, window.to_vec()));
        // Deferred drafts run before the verification.
        turns.iter_mut().for_each(|turn| turn.to_draft = Some(CONFIG));
        let round = RoundSteps::of_verification(View::Both, &turns);
        assert_eq!(round.drafts().map(|step| rows(&step)).collect::<Vec<_>>(), drafted);
        assert_eq!(round.drafts().map(|step| step.choose_pages).collect::<Vec<_>>(), [true, false]);
        for Step { weights, view, pages, .. } in round.drafts() {
            assert_eq!(DraftConfig { weights, view, pages }, CONFIG);
        }
        let verification = round.verification().unwrap();
        assert_eq!(rows(&verification), window);
        let Step { weights, view, pages, choose_pages, .. } = verification;
        assert_eq!((weights, view, pages, choose_pages), (Weights::Full, View::Both, Pages::All, false));
        // A round that is repeated without its drafts has no draft steps.
        turns.iter_mut().for_each(|turn| turn.gamma = 0);
        assert_eq!(RoundSteps::of_verification(View::Both, &turns).drafts().count(), 0);
    }
}
