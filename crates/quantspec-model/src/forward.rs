//! The network and its rounds, once: every backend runs these lines.
//!
//! A backend brings the operations ([`Network`], [`TokenSampler`]) and may run a [`Round`] in a way of its own ([`Executor`]): as the steps here one
//! after another, or as a graph that it recorded of them.

use crate::network::{Block, DraftPlan, Network, Pass, Row, Step};
use crate::prompt_cache::{PromptRows, Reuse};
use crate::sampler::{TokenSampler, Turn};
use quantspec_core::Result;
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::verify::Verdict;

/// One decoder layer. Where a model is split over devices, each holds a part of the sum that [`Network::reduce_residual`] adds, and an all-reduce belongs there.
fn layer<B: Network>(backend: &mut B, layer: usize, pass: &Pass) -> Result<()> {
    backend.qkv(layer, pass)?;
    backend.poll()?;
    backend.attend(layer, pass)?;
    backend.poll()?;
    backend.output(layer, pass)?;
    backend.reduce_residual(pass)?;
    backend.poll()?;
    backend.gate_up(layer, pass)?;
    backend.poll()?;
    backend.down(layer, pass)?;
    backend.reduce_residual(pass)?;
    backend.poll()
}

/// Runs a step up to its logits.
///
/// # Errors
/// Those of the backend's operations from [`Network::embed`] to [`Network::head`], and of [`Network::poll`].
pub fn step<B: Network>(backend: &mut B, step: &Step) -> Result<()> {
    let pass = Pass::Step(step);
    backend.embed(&pass)?;
    for index in 0..backend.config().layers {
        layer(backend, index, &pass)?;
    }
    backend.head(&pass)
}

/// Known rows that are restored in the time of one computed row, at least: a chunk counts them so.
const RESTORED_PER_ROW: usize = 32;

/// How far a prompt has been processed: layers that are done, and rows of the one under way.
#[derive(Debug, Default)]
pub struct PrefillCursor {
    embedded: bool,
    layer: usize,
    row: usize,
    /// Rows that are known, and those that are to be kept.
    reuse: Option<Reuse>,
}

impl PrefillCursor {
    /// The beginning of a prompt of which some rows are known.
    pub fn reusing(reuse: Reuse) -> PrefillCursor {
        PrefillCursor { reuse: Some(reuse), ..PrefillCursor::default() }
    }

    /// The first row that is computed.
    pub fn first(&self) -> usize {
        self.reuse.as_ref().map_or(0, Reuse::tokens)
    }

    /// Takes what was known and kept.
    pub fn take_reuse(&mut self) -> Option<Reuse> {
        self.reuse.take()
    }
}

/// Where a call of [`prefill_chunk`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// The prompt goes on with the next call.
    Part,
    /// It has been read.
    End,
    /// Known rows are damaged: it is to be begun anew.
    Damaged,
}

/// Runs a whole prompt, as [`prefill_chunk`], and reuses nothing.
///
/// # Errors
/// As there.
pub fn prefill<B: Network + PromptRows>(
    backend: &mut B,
    slot: usize,
    prompt: &[u32],
    block_rows: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    prefill_chunk(backend, slot, prompt, block_rows, &mut PrefillCursor::default(), usize::MAX, progress).map(|_| ())
}

/// Runs a prompt layer by layer in blocks of `block_rows`, so that full-precision keys and values exist for one layer at a
/// time; leaves the logits of the last row. Stops where `most_rows` rows, counted over all layers, were processed: the next call
/// goes on at the cursor. Steps of other slots may run in between, and change no bit. Rows that the cursor's [`Reuse`] knows are
/// not computed, but for the last of the prompt. `progress` is told the computed rows done, counted over all layers, after each
/// block and again after each layer.
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
    let starts = || (first..prompt.len()).step_by(block_rows);
    let block = |start: usize| Block { slot, prompt, start, rows: block_rows.min(prompt.len() - start) };
    if !cursor.embedded {
        for start in starts() {
            backend.embed(&Pass::Prefill(block(start)))?;
            backend.poll()?;
        }
        (cursor.embedded, cursor.row) = (true, first);
    }
    let mut processed = 0;
    while cursor.layer < layers {
        if processed >= most_rows {
            backend.end_chunk()?;
            return Ok(Chunk::Part);
        }
        if cursor.row == first
            && let Some(reuse) = &mut cursor.reuse
            && !reuse.restore(backend, cursor.layer)?
        {
            return Ok(Chunk::Damaged);
        }
        let next = block(cursor.row);
        layer(backend, cursor.layer, &Pass::Prefill(next))?;
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
    if let Some(start) = starts().next_back() {
        backend.head(&Pass::Prefill(block(start)))?;
    }
    Ok(Chunk::End)
}

/// The steps of a round: draft steps, then the verification. Every step of a watched draft is a round of its own.
#[derive(Clone, Debug)]
pub struct Round<'a> {
    /// What each sequence does.
    pub turns: &'a [Turn],
    /// Draft steps: what they read, and their rows.
    drafts: Vec<(DraftPlan, Vec<Row>)>,
    /// The verification: the target view, and its rows.
    verification: Option<(View, Vec<Row>)>,
}

impl<'a> Round<'a> {
    /// One draft step: offset `offset` of every turn with γ > `offset`. `None` where there is no such turn.
    pub fn of_draft(plan: &DraftPlan, turns: &'a [Turn], offset: usize) -> Option<Round<'a>> {
        let rows = draft_rows(turns.iter(), offset);
        (!rows.is_empty()).then(|| Round { turns, drafts: vec![(*plan, rows)], verification: None })
    }

    /// The verification of every turn's window over the target view, after the draft steps of turns that [`draft`] left to it.
    pub fn of_verification(view: View, turns: &'a [Turn]) -> Round<'a> {
        let plan = turns.iter().find_map(|turn| turn.to_draft);
        let left = |offset: usize| draft_rows(turns.iter().filter(|turn| turn.to_draft.is_some()), offset);
        let steps = (0..).map(left).take_while(|rows| !rows.is_empty());
        let drafts = plan.map_or_else(Vec::new, |plan| steps.map(|rows| (plan, rows)).collect());
        Round { turns, drafts, verification: Some((view, verify_rows(turns))) }
    }

    /// The draft steps, in order. The first token of a window chooses the pages.
    pub fn drafts(&self) -> impl Iterator<Item = Step<'_>> {
        self.drafts.iter().map(|(DraftPlan { weights, view, pages }, rows)| Step {
            weights: *weights,
            view: *view,
            pages: *pages,
            choose_pages: rows.first().is_some_and(|row| row.offset == 0),
            rows,
        })
    }

    /// The verification: full weights over the target view.
    pub fn verification(&self) -> Option<Step<'_>> {
        let (view, rows) = self.verification.as_ref()?;
        Some(Step { weights: Weights::Full, view: *view, pages: Pages::All, choose_pages: false, rows })
    }
}

fn row(turn: &Turn, offset: usize) -> Row {
    Row { slot: turn.slot, offset, position: turn.committed + offset }
}

/// Rows of a draft step: offset `offset` of every turn that drafts there.
fn draft_rows<'a>(turns: impl Iterator<Item = &'a Turn>, offset: usize) -> Vec<Row> {
    turns.filter(|turn| turn.drafts(offset)).map(|turn| row(turn, offset)).collect()
}

/// Rows of a verification: `[last, g_0 … g_{γ−1}]` of every turn.
fn verify_rows(turns: &[Turn]) -> Vec<Row> {
    turns.iter().flat_map(|turn| (0..=turn.gamma).map(|offset| row(turn, offset))).collect()
}

/// Runs rounds. The provided methods run their steps one after another.
pub trait Executor: Network + TokenSampler {
    /// Whether a round as a whole takes less time than its steps by themselves. [`draft`] then leaves drafts that are not watched to [`verify`].
    fn runs_rounds_whole(&self) -> bool {
        false
    }

    /// Prepares what draft steps read. [`draft`] calls it, so that its time is not measured as the verification's.
    ///
    /// # Errors
    /// Device errors of a GPU. The provided method has none.
    fn prepare_draft(&mut self, _plan: &DraftPlan) -> Result<()> {
        Ok(())
    }

    /// Runs a round: one verdict per turn where it verifies, in order.
    ///
    /// # Errors
    /// Those of [`run_steps`].
    fn run(&mut self, round: &Round) -> Result<Vec<Verdict>>
    where
        Self: Sized,
    {
        run_steps(self, round)
    }

    /// Seconds that draft steps took in the round of the last verification; `None` where it had none.
    ///
    /// # Errors
    /// Device errors of a GPU whose clock is read. The provided method has none.
    fn draft_seconds(&mut self) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Runs the steps of a round one after another.
///
/// # Errors
/// Those of [`step`], [`TokenSampler::propose`] and [`TokenSampler::judge`].
pub fn run_steps<B: Network + TokenSampler>(backend: &mut B, round: &Round) -> Result<Vec<Verdict>> {
    for next in round.drafts() {
        draft_step(backend, &next, round.turns)?;
    }
    let Some(window) = round.verification() else { return Ok(Vec::new()) };
    step(backend, &window)?;
    backend.judge(&window, round.turns)
}

/// A draft step, and the choice of its tokens.
///
/// # Errors
/// Those of [`step`] and [`TokenSampler::propose`].
pub fn draft_step<B: Network + TokenSampler>(backend: &mut B, next: &Step, turns: &[Turn]) -> Result<()> {
    step(backend, next)?;
    backend.propose(next, turns)
}

/// Drafts γ tokens per turn: step i feeds offset i of every turn with γ > i. The draft of a single turn that has a [`Turn::stop`] is watched: it ends
/// where it is unlikely enough that all its tokens stand. Other drafts may be left to [`verify`], which [`Turn::to_draft`] says, unless a grammar
/// has to see each token before it masks the next.
///
/// # Errors
/// Those of [`Executor::prepare_draft`], [`Network::poll`], [`Executor::run`] and [`TokenSampler::margin`], but for those [of tokens](quantspec_core::ErrorKind::is_of_tokens): there the draft ends.
pub fn draft<B: Executor>(backend: &mut B, plan: &DraftPlan, turns: &mut [Turn]) -> Result<()> {
    let masked = turns.iter().any(|turn| turn.constraint.is_some());
    if backend.runs_rounds_whole() && !masked && !is_watched(turns) {
        backend.prepare_draft(plan)?;
        turns.iter_mut().filter(|turn| !turn.copied).for_each(|turn| turn.to_draft = Some(*plan));
        return Ok(());
    }
    draft_now(backend, plan, turns)
}

/// Whether somebody looks at every token of a draft.
fn is_watched(turns: &[Turn]) -> bool {
    matches!(turns, [turn] if turn.stop.is_some())
}

/// [`draft`], with all tokens in the windows when it returns.
///
/// # Errors
/// As there.
pub fn draft_now<B: Executor>(backend: &mut B, plan: &DraftPlan, turns: &mut [Turn]) -> Result<()> {
    backend.prepare_draft(plan)?;
    backend.poll()?;
    let watched = is_watched(turns);
    for offset in 0.. {
        let Some(round) = Round::of_draft(plan, turns, offset) else { break };
        match backend.run(&round) {
            // What the draft alone cannot compute is no fault of the text. What was drafted before is verified, and its rows take the place of these.
            Err(error) if error.kind.is_of_tokens() => {
                turns.iter_mut().filter(|turn| turn.drafts(offset)).for_each(|turn| turn.gamma = offset);
                break;
            }
            result => result?,
        };
        if let ([turn], true) = (&mut *turns, watched) {
            turn.drafted(backend.margin(turn.slot)?);
        }
    }
    Ok(())
}

/// Verifies `[last, g_0 … g_{γ−1}]` of every turn in one pass of full weights over the target view.
///
/// # Errors
/// Those of [`Network::poll`] and of [`Executor::run`].
pub fn verify<B: Executor>(backend: &mut B, view: View, turns: &[Turn]) -> Result<Vec<Verdict>> {
    backend.poll()?;
    backend.run(&Round::of_verification(view, turns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::sample::Sampler;

    const PLAN: DraftPlan = DraftPlan { weights: Weights::Draft, view: View::Upper, pages: Pages::Best(4) };

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
            let round = Round::of_draft(&PLAN, &turns, offset).unwrap();
            let steps: Vec<Step> = round.drafts().collect();
            assert_eq!((steps.len(), rows(&steps[0]), steps[0].choose_pages), (1, rows_of.clone(), offset == 0));
            assert!(round.verification().is_none());
        }
        assert!(Round::of_draft(&PLAN, &turns, 2).is_none());

        // What stands in the windows is verified alone.
        let round = Round::of_verification(View::Both, &turns);
        assert_eq!((round.drafts().count(), rows(&round.verification().unwrap())), (0, window.to_vec()));
        // What was left to the verification is drafted ahead of it.
        turns.iter_mut().for_each(|turn| turn.to_draft = Some(PLAN));
        let round = Round::of_verification(View::Both, &turns);
        assert_eq!(round.drafts().map(|step| rows(&step)).collect::<Vec<_>>(), drafted);
        assert_eq!(round.drafts().map(|step| step.choose_pages).collect::<Vec<_>>(), [true, false]);
        for Step { weights, view, pages, .. } in round.drafts() {
            assert_eq!(DraftPlan { weights, view, pages }, PLAN);
        }
        let verification = round.verification().unwrap();
        assert_eq!(rows(&verification), window);
        let Step { weights, view, pages, choose_pages, .. } = verification;
        assert_eq!((weights, view, pages, choose_pages), (Weights::Full, View::Both, Pages::All, false));
        // A round that is taken again without its drafts has none.
        turns.iter_mut().for_each(|turn| turn.gamma = 0);
        assert_eq!(Round::of_verification(View::Both, &turns).drafts().count(), 0);
    }
}
