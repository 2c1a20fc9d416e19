//! Penalties and masks on the device (kernels/penalty.cu). The committed text of every slot is mirrored from [`History`] as it
//! grows; masks are those of a step's rows.

use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch, Plain};
use crate::shapes::{COMMIT_TOKENS, PENALTY_THREADS, PENALTY_TOKENS};
use quantspec_core::grammar::{Mask, words};
use quantspec_core::penalty::History;
use quantspec_core::{Error, Result};
use quantspec_model::backend::Turn;
use std::sync::Arc;

/// Blocks that search a text for n-grams: enough to read 100,000 tokens at full bandwidth.
const SEARCHERS: u32 = 32;

/// A slot's penalties; `History` in kernels/penalty.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct DeviceHistory {
    on: i32,
    ngram: i32,
    repetition: f32,
    frequency: f32,
    presence: f32,
    length: i32,
    prompt: i32,
    unused: i32,
}

/// Committed tokens of a slot; `Commit` in kernels/penalty.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct DeviceCommit {
    slot: i32,
    added: i32,
    history: DeviceHistory,
    /// The new tokens if they fit; otherwise they are copied separately.
    tokens: [u32; COMMIT_TOKENS],
}

/// Bytes of a [`DeviceHistory`] and of a [`DeviceCommit`].
const HISTORY_BYTES: usize = size_of::<DeviceHistory>();
const COMMIT_BYTES: usize = size_of::<DeviceCommit>();

const _: () = assert!(HISTORY_BYTES == 32 && COMMIT_BYTES == 160);
// SAFETY: numbers only, without padding.
unsafe impl Plain for DeviceCommit {}

/// The part of a slot's text that the device holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Known {
    /// The slot has penalties.
    on: bool,
    /// [`History::answer`] of the text, and its number of tokens; `None` if the slot has another sequence.
    text: Option<(usize, usize)>,
}

/// Texts and penalties of all slots.
#[derive(Debug)]
pub(crate) struct Penalising {
    device: Arc<Device>,
    commit: Kernel,
    apply: Kernel,
    forbid: Kernel,
    mask: Kernel,
    vocab: usize,
    /// Tokens of the longest sequence.
    pitch: usize,
    /// `[slots]`
    histories: Buffer,
    commits: Buffer,
    /// `[slots][pitch]`
    texts: Buffer,
    /// `[slots][vocab]`
    counts: Buffer,
    /// `[rows][words]`
    masks: Buffer,
    known: Vec<Known>,
}

impl Penalising {
    /// Bytes taken on the device, for steps of up to `rows` rows.
    pub(crate) fn bytes(vocab: usize, slots: usize, rows: usize, capacity: usize) -> usize {
        slots * (HISTORY_BYTES + COMMIT_BYTES + 4 * (capacity.max(1) + vocab)) + rows * words(vocab) * 4
    }

    pub(crate) fn new(
        device: &Arc<Device>,
        vocab: usize,
        slots: usize,
        rows: usize,
        capacity: usize,
    ) -> Result<Penalising> {
        let pitch = capacity.max(1);
        Ok(Penalising {
            commit: device.kernel("penalty_commit", 0)?,
            apply: device.kernel("penalty_apply", 0)?,
            forbid: device.kernel("penalty_forbid", 0)?,
            mask: device.kernel("penalty_mask", 0)?,
            histories: device.zeroed(slots * HISTORY_BYTES)?,
            commits: device.allocate(slots * COMMIT_BYTES)?,
            texts: device.allocate(slots * pitch * 4)?,
            counts: device.allocate(slots * vocab * 4)?,
            masks: device.allocate(rows * words(vocab) * 4)?,
            known: vec![Known::default(); slots],
            device: device.clone(),
            vocab,
            pitch,
        })
    }

    /// Bytes held on the device.
    pub(crate) fn held_bytes(&self) -> usize {
        [&self.histories, &self.commits, &self.texts, &self.counts, &self.masks].into_iter().map(Buffer::bytes).sum()
    }

    /// Call when the slot gets another sequence.
    pub(crate) fn forget(&mut self, slot: usize) {
        if let Some(known) = self.known.get_mut(slot) {
            known.text = None;
        }
    }

    /// Sends the new tokens of the texts of `turns` to the device. Returns true if one of them has penalties.
    pub(crate) fn upload(&mut self, turns: &[Turn]) -> Result<bool> {
        let mut commits = Vec::new();
        for turn in turns {
            commits.extend(self.commit_of(turn.slot, turn.history.as_deref())?);
        }
        if !commits.is_empty() {
            self.commits.write(0, &commits)?;
            let arguments = args![&self.commits, &self.histories, &self.texts, self.pitch, &self.counts, self.vocab];
            let launch =
                Launch { grid: [commits.len() as u32, 1, 1], block: PENALTY_THREADS as u32, shared: 0, overlap: false };
            // SAFETY: the argument list is the kernel's; slots, lengths and tokens were checked.
            unsafe { self.device.launch(self.commit, launch, &arguments)? };
        }
        Ok(turns.iter().any(|turn| turn.history.is_some()))
    }

    fn commit_of(&mut self, slot: usize, history: Option<&History>) -> Result<Option<DeviceCommit>> {
        let known = self.known.get_mut(slot).ok_or_else(|| Error::internal(format!("slot {slot} does not exist")))?;
        let Some(history) = history else {
            let was_on = std::mem::take(known).on;
            return Ok(was_on.then(|| DeviceCommit { slot: slot as i32, ..DeviceCommit::default() }));
        };
        let (text, penalties) = (history.text(), history.penalties());
        let from = match known.text {
            Some((answer, length)) if answer == history.answer() && length <= text.len() => length,
            _ => {
                let bytes = self.vocab * 4;
                self.counts.fill_rows(0, slot * bytes, bytes, bytes, 1)?;
                0
            }
        };
        if known.on && known.text == Some((history.answer(), text.len())) {
            return Ok(None);
        }
        let added = &text[from..];
        if text.len() > self.pitch || added.iter().any(|&token| token as usize >= self.vocab) {
            return Err(Error::internal(format!("a text of {} tokens in a slot of {}", text.len(), self.pitch)));
        }
        let mut commit = DeviceCommit {
            slot: slot as i32,
            added: added.len() as i32,
            history: DeviceHistory {
                on: 1,
                ngram: penalties.no_repeat_ngram as i32,
                repetition: penalties.repetition,
                frequency: penalties.frequency,
                presence: penalties.presence,
                length: text.len() as i32,
                prompt: history.prompt_tokens() as i32,
                unused: 0,
            },
            tokens: [0; COMMIT_TOKENS],
        };
        match commit.tokens.get_mut(..added.len()) {
            Some(tokens) => tokens.copy_from_slice(added),
            None => self.texts.write((slot * self.pitch + from) * 4, added)?,
        }
        *known = Known { on: true, text: Some((history.answer(), text.len())) };
        Ok(Some(commit))
    }

    /// Copies the masks of a step's rows to the device; `None` allows all tokens.
    pub(crate) fn set_masks(&self, rows: &[Option<Mask>]) -> Result<()> {
        let words = words(self.vocab);
        let mut masks = Vec::with_capacity(rows.len() * words);
        for (row, mask) in rows.iter().enumerate() {
            match mask {
                None => masks.resize((row + 1) * words, u32::MAX),
                Some(mask) => {
                    masks.extend(mask.iter().take(words));
                    masks.resize((row + 1) * words, 0);
                }
            }
        }
        self.masks.write(0, &masks)
    }

    /// Queues the masks of the first `count` rows.
    pub(crate) fn mask(&self, count: usize, logits: u64) -> Result<()> {
        let grid = [self.vocab.div_ceil(PENALTY_TOKENS) as u32, count as u32, 1];
        let arguments = args![&self.masks, words(self.vocab), logits, self.vocab];
        // SAFETY: the argument list is the kernel's; masks and logits hold `count` rows.
        unsafe {
            self.device.launch(
                self.mask,
                Launch { grid, block: PENALTY_THREADS as u32, shared: 0, overlap: true },
                &arguments,
            )
        }
    }

    /// Queues the penalties of `count` rows of logits, in place. Windows are `pitch` tokens apart.
    pub(crate) fn apply(&self, rows: u64, count: usize, windows: u64, pitch: usize, logits: u64) -> Result<()> {
        let launch = |blocks: u32| Launch {
            grid: [blocks, count as u32, 1],
            block: PENALTY_THREADS as u32,
            shared: 0,
            overlap: true,
        };
        let arguments = args![rows, &self.histories, &self.counts, windows, pitch, logits, self.vocab];
        let search = args![rows, &self.histories, &self.texts, self.pitch, windows, pitch, logits, self.vocab];
        // SAFETY: the argument lists are the kernels'; rows, windows and logits are the backend's and hold `count` rows.
        unsafe {
            self.device.launch(self.apply, launch(self.vocab.div_ceil(PENALTY_TOKENS) as u32), &arguments)?;
            self.device.launch(self.forbid, launch(SEARCHERS), &search)
        }
    }
}
