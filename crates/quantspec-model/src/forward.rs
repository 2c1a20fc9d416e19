//! The network, once: every backend runs these lines.

use crate::backend::{Backend, Block, DraftPlan, Pass, Row, Step, Turn};
use crate::prompt_cache::Reuse;
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::verify::Verdict;
use quantspec_core::{ErrorKind, Result};

/// One decoder layer.
fn layer<B: Backend>(backend: &mut B, layer: usize, pass: &Pass) -> Result<()> {
    backend.qkv(layer, pass)?;
    backend.poll()?;
    backend.attend(layer, pass)?;
    backend.poll()?;
    backend.output(layer, pass)?;
    backend.poll()?;
    backend.gate_up(layer, pass)?;
    backend.poll()?;
    backend.down(layer, pass)?;
    backend.poll()
}

/// Runs a step up to its logits.
///
/// # Errors
/// Those of the backend's operations from [`Backend::embed`] to [`Backend::head`], and of [`Backend::poll`].
pub fn step<B: Backend>(backend: &mut B, step: &Step) -> Result<()> {
    let pass = Pass::Step(step);
    backend.embed(&pass)?;
    for index in 0..backend.config().layers {
        layer(backend, index, &pass)?;
    }
    backend.head(&pass)
}

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
pub fn prefill<B: Backend>(
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
/// Those of the operations of [`step`], of [`Backend::store`], of [`Backend::end_chunk`], and of [`Reuse`].
pub fn prefill_chunk<B: Backend>(
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
        processed += next.rows;
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

/// Drafts γ tokens per turn: step i feeds offset i of every turn with γ > i. A turn ends where it is unlikely enough that all its tokens stand.
///
/// # Errors
/// Those of [`step`] and of [`Backend::propose`], but for [`ErrorKind::NotFinite`]: there the draft ends.
pub fn draft<B: Backend>(backend: &mut B, plan: &DraftPlan, turns: &mut [Turn]) -> Result<()> {
    for offset in 0.. {
        let rows: Vec<Row> = turns
            .iter()
            .filter(|turn| turn.gamma > offset)
            .map(|turn| Row { slot: turn.slot, offset, position: turn.committed + offset })
            .collect();
        if rows.is_empty() {
            break;
        }
        let next =
            Step { weights: plan.weights, view: plan.view, pages: plan.pages, choose_pages: offset == 0, rows: &rows };
        match step(backend, &next).and_then(|()| backend.propose(&next, turns)) {
            // What the draft alone cannot compute is no fault of the text. What was drafted before is verified, and its rows take the place of these.
            Err(error) if error.kind == ErrorKind::NotFinite => {
                turns.iter_mut().for_each(|turn| turn.gamma = turn.gamma.min(offset));
                break;
            }
            result => result?,
        }
        for turn in turns.iter_mut().filter(|turn| turn.gamma > offset) {
            turn.drafted(backend.lead(turn.slot));
        }
    }
    Ok(())
}

/// Verifies `[last, g_0 … g_{γ−1}]` of every turn in one pass of full weights over the target view.
///
/// # Errors
/// Those of [`step`] and of [`Backend::judge`].
pub fn verify<B: Backend>(backend: &mut B, view: View, turns: &[Turn]) -> Result<Vec<Verdict>> {
    let rows: Vec<Row> = turns
        .iter()
        .flat_map(|turn| {
            (0..=turn.gamma).map(|offset| Row { slot: turn.slot, offset, position: turn.committed + offset })
        })
        .collect();
    let window = Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows: &rows };
    step(backend, &window)?;
    backend.judge(&window, turns)
}
