//! Drafting with a draft model (Leviathan et al. 2023, arXiv 2211.17192): a smaller one with the same tokenizer, on
//! its own backend of the target's kind.
//!
//! Its cache holds the tokens it was fed. Emitted tokens that it was not fed (the last drafted token if all were accepted,
//! and all tokens of rounds it did not draft) are fed before its next draft. Rejected tokens are dropped by length, as in the
//! target's cache.

use super::{Drafter, Needs, Outlook, Proposed, Target, usable_configs};
use crate::backend::{Backend, DraftConfig, Memory, Row, Step, Turn};
use crate::forward::{self, Chunk, PrefillCursor};
use quantspec_core::cache::{Extent, GAMMA_MAX};
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::sample::Accept;
use quantspec_core::verify::DraftDistribution;
use quantspec_core::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most rows of a step that feeds missing tokens.
pub const CATCH_UP_ROWS: usize = GAMMA_MAX;

/// Drafts with its own network. Clones share it, so that methods can differ in the pages it reads.
pub struct DraftModel<B: Backend> {
    shared: Arc<Mutex<Shared<B>>>,
    /// Draft configuration of each candidate.
    configs: Vec<DraftConfig>,
}

/// The draft model's backend and its sequences.
struct Shared<B: Backend> {
    backend: B,
    capacity: usize,
    block_rows: usize,
    /// Prompts of sequences that have not begun.
    prompts: HashMap<usize, Prompt>,
    sequences: HashMap<usize, Sequence>,
}

#[derive(Debug)]
enum Prompt {
    Begun(Box<PrefillCursor>),
    Read,
    NotFinite,
}

/// A sequence of the draft model.
#[derive(Debug, Default)]
struct Sequence {
    /// Tokens in its cache.
    extent: Extent,
    /// Tokens after these, the last emitted one at the end; never empty after prefill.
    pending: Vec<u32>,
    /// Tokens drafted in the current round; all but the last were fed.
    drafted: usize,
}

impl<B: Backend> DraftModel<B> {
    /// Drafts with a backend that has as many slots as the target's, of `capacity` tokens each, and steps of at least
    /// [`CATCH_UP_ROWS`] rows. Each of `pages`, at least one, is a candidate. Prompts are processed in blocks of
    /// `block_rows`.
    pub fn new(backend: B, view: View, pages: &[Pages], capacity: usize, block_rows: usize) -> DraftModel<B> {
        let shared = Shared { backend, capacity, block_rows, prompts: HashMap::new(), sequences: HashMap::new() };
        DraftModel { shared: Arc::new(Mutex::new(shared)), configs: configs(view, pages) }
    }

    /// The same network with another view and other pages of its cache.
    pub fn reading(&self, view: View, pages: &[Pages]) -> DraftModel<B> {
        DraftModel { shared: self.shared.clone(), configs: configs(view, pages) }
    }

    fn network(&self) -> Result<MutexGuard<'_, Shared<B>>> {
        self.shared.lock().map_err(|_| Error::internal("the draft model panicked in an earlier call"))
    }
}

fn configs(view: View, pages: &[Pages]) -> Vec<DraftConfig> {
    pages.iter().map(|&pages| DraftConfig { weights: Weights::Full, view, pages }).collect()
}

impl<B: Backend> fmt::Debug for DraftModel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DraftModel").field("configs", &self.configs).finish_non_exhaustive()
    }
}

impl<B: Backend> Shared<B> {
    fn read_prompt(
        &mut self,
        slot: usize,
        prompt: &[u32],
        most_rows: usize,
        progress: &mut dyn FnMut(),
    ) -> Result<bool> {
        if !self.prompts.contains_key(&slot) {
            self.end(slot);
            self.backend.open(slot, self.capacity)?;
            self.prompts.insert(slot, Prompt::Begun(Box::default()));
        }
        let Some(Prompt::Begun(cursor)) = self.prompts.get_mut(&slot) else { return Ok(true) };
        let Shared { backend, block_rows, .. } = self;
        let mut progress = |_, _| progress();
        let mut read = forward::prefill_chunk(backend, slot, prompt, *block_rows, cursor, most_rows, &mut progress);
        // A GPU reports values that are not finite at the end of a chunk.
        if let Ok(Chunk::End) = read {
            read = backend.end_chunk().map(|()| Chunk::End);
        }
        match read {
            Ok(Chunk::More) => return Ok(false),
            Ok(_) => _ = self.prompts.insert(slot, Prompt::Read),
            Err(error) if error.kind == ErrorKind::NotFinite => _ = self.prompts.insert(slot, Prompt::NotFinite),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn begin(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        self.read_prompt(slot, prompt, usize::MAX, &mut || ())?;
        if let Some(Prompt::Read) = self.prompts.get(&slot) {
            self.prompts.remove(&slot);
            let sequence = self.sequences.entry(slot).or_default();
            sequence.pending.push(first);
            sequence.extent.commit(prompt.len());
        } else {
            self.end(slot);
        }
        Ok(())
    }

    /// Non-finite values of the draft model end its drafts of a sequence, and are no error of the text.
    fn end_drafts_if_not_finite(&mut self, slot: usize, result: Result<()>) -> Result<()> {
        match result {
            Err(error) if error.kind == ErrorKind::NotFinite => {
                self.end(slot);
                Ok(())
            }
            result => result,
        }
    }

    fn end(&mut self, slot: usize) {
        let read = self.prompts.remove(&slot).is_some();
        if self.sequences.remove(&slot).is_some() || read {
            self.backend.close(slot);
        }
    }

    /// Feeds all pending tokens but the last; its cache then holds the same `committed` tokens as the target's.
    fn catch_up(&mut self, slot: usize, committed: usize, config: &DraftConfig) -> Result<()> {
        let Shared { backend, sequences, .. } = self;
        let Some(sequence) = sequences.get_mut(&slot) else { return Ok(()) };
        if sequence.extent.committed() + sequence.pending.len() != committed + 1 {
            return Err(Error::internal(format!("the draft model has another text for slot {slot}")));
        }
        let lags = sequence.pending.len() > 1;
        while sequence.pending.len() > 1 {
            let rows = CATCH_UP_ROWS.min(sequence.pending.len() - 1);
            let fed = sequence.pending[..rows].to_vec();
            let committed = sequence.extent.committed();
            let rows: Vec<Row> = (0..rows).map(|offset| Row { slot, offset, position: committed + offset }).collect();
            // If drafts read a page window, the cache may keep no other pages. Other choices follow one row's query, but rows
            // of one step read the same pages.
            let pages = config.window().map_or(Pages::All, Pages::Window);
            let step = Step {
                weights: config.weights,
                view: config.view,
                pages,
                choose_pages: pages != Pages::All,
                rows: &rows,
            };
            backend.set_window(slot, &fed)?;
            forward::step(backend, &step)?;
            // Drained only now, so that an interrupted step can be repeated.
            sequence.pending.drain(..fed.len());
            for page in sequence.extent.commit(fed.len()) {
                backend.flush(slot, page)?;
            }
        }
        if lags {
            // A GPU would report values that are not finite with the next chunk of another slot's prompt.
            backend.end_chunk()?;
        }
        backend.set_window(slot, &sequence.pending)
    }
}

impl<B: Backend> Drafter for DraftModel<B> {
    fn needs(&self) -> Needs {
        Needs { distributions: true, ..Needs::default() }
    }

    fn margins(&self) -> bool {
        true
    }

    fn candidates(&self) -> usize {
        self.configs.len()
    }

    fn usable(&self, outlook: &Outlook) -> Vec<bool> {
        usable_configs(&self.configs, outlook)
    }

    fn read_prompt(&mut self, slot: usize, prompt: &[u32], most_work: f64, progress: &mut dyn FnMut()) -> Result<bool> {
        let mut network = self.network()?;
        let layer_bytes = network.backend.memory().weights_bytes as f64 / network.backend.config().layers as f64;
        network.read_prompt(slot, prompt, ((most_work / layer_bytes) as usize).max(1), progress)
    }

    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        self.network()?.begin(slot, prompt, first)
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], candidate: usize) -> Result<Proposed> {
        let config = self.configs[candidate];
        let mut network = self.network()?;
        let drafting = turns.iter().filter(|turn| turn.drafts(0));
        let mut own: Vec<Turn> = drafting.map(|turn| Turn { reads_logits: false, ..turn.clone() }).collect();
        for turn in &own {
            let caught_up = network.catch_up(turn.slot, turn.committed, &config);
            network.end_drafts_if_not_finite(turn.slot, caught_up)?;
        }
        own.retain(|turn| network.sequences.contains_key(&turn.slot));
        if !own.is_empty() {
            forward::draft_now(&mut network.backend, &config, &mut own, None)?;
        }
        let (mut without_token, mut steps, mut own) = (0, 1, own.into_iter().peekable());
        for turn in turns.iter_mut().filter(|turn| turn.drafts(0)) {
            let Some(mut drafted) = own.next_if(|drafted| drafted.slot == turn.slot) else {
                (turn.gamma, without_token) = (0, without_token + 1);
                continue;
            };
            let Shared { backend, sequences, .. } = &mut *network;
            let window = backend.window(turn.slot, drafted.gamma + 1)?;
            target.set_proposed(turn.slot, &window[1..])?;
            if turn.sampler.accept == Accept::Rejection {
                for offset in 0..drafted.gamma {
                    match backend.distribution(turn.slot, offset) {
                        // Rejection divides by q, so NaN ends the draft.
                        Err(error) if error.kind == ErrorKind::NotFinite => {
                            drafted.gamma = offset;
                            break;
                        }
                        q => target.set_distribution(turn.slot, offset, &q?)?,
                    }
                }
            }
            if let Some(sequence) = sequences.get_mut(&turn.slot) {
                sequence.drafted = drafted.gamma;
            }
            without_token += usize::from(drafted.gamma == 0);
            steps = steps.max(drafted.gamma);
            (turn.gamma, turn.margins, turn.q) = (drafted.gamma, drafted.margins, DraftDistribution::Kept);
        }
        if turns.iter().any(|turn| turn.sampler.accept == Accept::Rejection) {
            // Handled above; a GPU would report them again with another slot's next prompt.
            _ = network.backend.end_chunk();
        }
        Ok(Proposed { steps, without_token, pages: Some(config.pages), guessed: (0, 0) })
    }

    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        let mut network = self.network()?;
        let Shared { backend, sequences, .. } = &mut *network;
        let Some(sequence) = sequences.get_mut(&slot) else { return Ok(()) };
        sequence.pending.extend(tokens);
        // It was fed the last token and its drafted tokens up to the last but one; of these the emitted ones are kept.
        let fed = std::mem::take(&mut sequence.drafted).min(tokens.len());
        sequence.pending.drain(..fed);
        let flushed = sequence.extent.commit(fed).try_for_each(|page| backend.flush(slot, page));
        network.end_drafts_if_not_finite(slot, flushed)
    }

    fn close(&mut self, slot: usize) {
        if let Ok(mut network) = self.network() {
            network.end(slot);
        }
    }

    fn memory(&self) -> Memory {
        self.network().map(|network| network.backend.memory().of_draft()).unwrap_or_default()
    }
}
