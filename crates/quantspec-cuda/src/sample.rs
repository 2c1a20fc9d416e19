//! Choosing and judging tokens on the device (kernels/sample.cu), and the windows they are written to.
//!
//! Windows, verdicts, the error flag and the logit margin of a drafted token are in one buffer, so that a round ends with one
//! copy to the host.

use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch, Pinned, Plain};
use crate::penalty::Penalising;
use crate::shapes::{CUT_BYTES, CUT_THREADS, RACE_BYTES, SAMPLE_THREADS, SAMPLE_TILE, SAMPLE_VOCAB_MAX};
use quantspec_core::cache::GAMMA_MAX;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::verify::{DraftDistribution, Verdict};
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Row, Turn};
use std::sync::Arc;

/// Bytes of a row's partial results, one `Race` (kernels/sample.cu) per block.
const fn race_bytes(vocab: usize) -> usize {
    RACE_BYTES * vocab.div_ceil(SAMPLE_TILE)
}
/// Byte offsets in [`Sampling::shared`], which begins with the target's error flag: the logit margin of a proposed token, the
/// error flag of drafts, the verdicts.
const MARGIN_AT: usize = 4;
const DRAFT_FLAG_AT: usize = 8;
const VERDICTS_AT: usize = 16;

/// A slot's sampler; `Sampler` in kernels/sample.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DeviceSampler {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: i32,
    seed: [u32; 2],
    sequence: [u32; 2],
    accept: i32,
    unused: [i32; 3],
}

/// The rows of a slot in a verify step; `Turn` in kernels/sample.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceTurn {
    slot: i32,
    first_row: i32,
    gamma: i32,
    position: i32,
    one_hot: i32,
}

/// Bytes of a turn.
pub(crate) const TURN_BYTES: usize = size_of::<DeviceTurn>();

const SAMPLER_BYTES: usize = size_of::<DeviceSampler>();
const _: () = assert!(SAMPLER_BYTES == 48 && TURN_BYTES == 20);
// SAFETY: numbers only, without padding.
unsafe impl Plain for DeviceSampler {}
// SAFETY: see above.
unsafe impl Plain for DeviceTurn {}

/// Features that the choices of some slots need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SamplingFeatures {
    /// One of them has a temperature.
    pub(crate) warm: bool,
    /// One of them accepts by rejection.
    pub(crate) rejects: bool,
    /// One of them has penalties.
    pub(crate) penalises: bool,
    /// One of them follows a grammar.
    pub(crate) masks: bool,
}

impl DeviceSampler {
    fn new(sampler: &Sampler) -> DeviceSampler {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        DeviceSampler {
            temperature: sampler.temperature,
            top_p: sampler.top_p,
            min_p: sampler.min_p,
            top_k: i32::try_from(sampler.top_k).unwrap_or(i32::MAX),
            seed: halves(sampler.seed),
            sequence: halves(sampler.sequence),
            accept: match sampler.accept {
                Accept::Greedy => 0,
                Accept::Replay => 1,
                Accept::Rejection => 2,
            },
            unused: [0; 3],
        }
    }
}

/// Choices, verdicts and windows of all slots.
#[derive(Debug)]
pub(crate) struct Sampling {
    device: Arc<Device>,
    cut: Kernel,
    choose: Kernel,
    judge: Kernel,
    vocab: usize,
    slots: usize,
    /// Tokens of a window.
    pitch: usize,
    /// Error flag, logit margin, error flag of drafts, verdicts `[slots]`, windows `[slots][pitch]`.
    shared: Buffer,
    result: Pinned,
    samplers: Buffer,
    turns: Buffer,
    cuts: Buffer,
    choices: Buffer,
    /// Partial results of the blocks that search a row, `[rows][blocks]`.
    races: Buffer,
    arrived: Buffer,
    penalties: Penalising,
    /// Draft logits f32 `[slot][GAMMA_MAX][vocab]` and their cuts, if the backend was loaded for rejection.
    draft: Option<(Buffer, Buffer)>,
    /// Samplers on the device, per slot.
    known: Vec<Option<DeviceSampler>>,
    /// Host copy of the windows, `[slots][pitch]`.
    windows: Vec<u32>,
    /// Per slot, the leading window tokens that the host set and no draft has replaced. Rows carry them to the device.
    set: Vec<usize>,
    /// True if `windows` is current: the device has not written since the host read them.
    fresh: bool,
}

/// Refuses vocabularies that the kernels do not support.
pub(crate) fn check(vocab: usize) -> Result<()> {
    if vocab > SAMPLE_VOCAB_MAX {
        return Err(Error::model(
            format!("a vocabulary of {vocab} tokens on the GPU"),
            format!("the kernels support up to {SAMPLE_VOCAB_MAX}; use --device cpu"),
        ));
    }
    Ok(())
}

impl Sampling {
    /// Device bytes, including rejection's draft logits.
    pub(crate) fn bytes(
        vocab: usize,
        slots: usize,
        rows: usize,
        pitch: usize,
        capacity: usize,
        rejection: bool,
    ) -> usize {
        let drafted = if rejection { slots * GAMMA_MAX * (vocab * 4 + CUT_BYTES) } else { 0 };
        Sampling::shared_bytes(slots, pitch)
            + slots * (SAMPLER_BYTES + TURN_BYTES)
            + rows * (CUT_BYTES + 4 + race_bytes(vocab) + 4)
            + Penalising::bytes(vocab, slots, rows, capacity)
            + drafted
    }

    fn shared_bytes(slots: usize, pitch: usize) -> usize {
        VERDICTS_AT + slots * 8 + slots * pitch * 4
    }

    pub(crate) fn new(
        device: &Arc<Device>,
        vocab: usize,
        slots: usize,
        rows: usize,
        pitch: usize,
        capacity: usize,
        rejection: bool,
    ) -> Result<Sampling> {
        check(vocab)?;
        let bytes = Sampling::shared_bytes(slots, pitch);
        let drafted = slots * GAMMA_MAX;
        Ok(Sampling {
            cut: device.kernel("sample_cut", 0)?,
            choose: device.kernel("sample_choose", 0)?,
            judge: device.kernel("judge", 0)?,
            shared: device.zeroed(bytes)?,
            result: device.pinned(bytes)?,
            samplers: device.zeroed(slots * SAMPLER_BYTES)?,
            turns: device.zeroed(slots * TURN_BYTES)?,
            cuts: device.zeroed(rows * CUT_BYTES)?,
            choices: device.zeroed(rows * 4)?,
            races: device.allocate(rows * race_bytes(vocab))?,
            arrived: device.zeroed(rows * 4)?,
            penalties: Penalising::new(device, vocab, slots, rows, capacity)?,
            draft: match rejection {
                true => Some((device.allocate(drafted * vocab * 4)?, device.allocate(drafted * CUT_BYTES)?)),
                false => None,
            },
            known: vec![None; slots],
            windows: vec![0; slots * pitch],
            set: vec![0; slots],
            fresh: true,
            device: device.clone(),
            vocab,
            slots,
            pitch,
        })
    }

    /// Bytes held on the device.
    pub(crate) fn held_bytes(&self) -> usize {
        let buffers =
            [&self.shared, &self.samplers, &self.turns, &self.cuts, &self.choices, &self.races, &self.arrived];
        let drafted = self.draft.iter().flat_map(|(logits, cuts)| [logits, cuts]);
        buffers.into_iter().chain(drafted).map(Buffer::bytes).sum::<usize>() + self.penalties.held_bytes()
    }

    /// The buffer that the host reads after a round; begins with the device's error flag.
    pub(crate) fn shared(&self) -> &Buffer {
        &self.shared
    }

    /// Address of the device's error flag.
    pub(crate) fn flag(&self) -> u64 {
        self.shared.at(0)
    }

    /// Address of the error flag of draft steps. Rounds do not read it: non-finite values of a draft do not affect the text.
    pub(crate) fn draft_flag(&self) -> u64 {
        self.shared.at(DRAFT_FLAG_AT)
    }

    /// Address of the windows.
    pub(crate) fn windows(&self) -> u64 {
        self.shared.at(self.windows_at())
    }

    /// Tokens of a window.
    pub(crate) fn pitch(&self) -> usize {
        self.pitch
    }

    fn windows_at(&self) -> usize {
        VERDICTS_AT + self.slots * 8
    }

    /// Waits for all queued work and reads flag, verdicts and windows. Returns the flag and clears it.
    pub(crate) fn read(&mut self) -> Result<u32> {
        let bytes = Sampling::shared_bytes(self.slots, self.pitch);
        self.shared.read_pinned(0, &mut self.result, bytes)?;
        let at = self.windows_at();
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
        };
        let read = words(self.result.bytes());
        for slot in 0..self.slots {
            let range = slot * self.pitch + self.set[slot]..(slot + 1) * self.pitch;
            self.windows[range.clone()].copy_from_slice(&read[at / 4..][range]);
        }
        self.fresh = true;
        let flag = read.first().copied().unwrap_or(0);
        if flag != 0 {
            self.clear_flag()?;
        }
        Ok(flag)
    }

    /// Returns the target's error flag, with `drafts` also that of drafts, and clears it. For callers that read logits
    /// outside a round.
    pub(crate) fn take_flag(&self, drafts: bool) -> Result<u32> {
        let words = self.shared.read::<u32>(0, VERDICTS_AT / 4)?;
        let at = |byte: usize| words.get(byte / 4).copied().unwrap_or(0);
        let flag = at(0) | if drafts { at(DRAFT_FLAG_AT) } else { 0 };
        if flag != 0 {
            self.clear_flag()?;
        }
        Ok(flag)
    }

    /// Waits for all queued work and clears the error flags of target and drafts.
    pub(crate) fn clear_flag(&self) -> Result<()> {
        self.shared.write(0, &[0u32; DRAFT_FLAG_AT / 4 + 1])
    }

    fn verdict(&mut self, index: usize) -> Result<Verdict> {
        let at = VERDICTS_AT + index * 8;
        match self.result.bytes().get(at..at + 8) {
            Some(&[a, b, c, d, e, f, g, h]) => {
                let (accepted, token) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
                Ok(Verdict { accepted: accepted as usize, token })
            }
            _ => Err(Error::internal(format!("no verdict {index}"))),
        }
    }

    /// Writes tokens into a slot's window; rows carry them to the device.
    pub(crate) fn set_window(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        if tokens.len() > self.pitch || slot >= self.slots {
            return Err(Error::internal(format!("{} tokens for a window of {}", tokens.len(), self.pitch)));
        }
        self.windows[slot * self.pitch..][..tokens.len()].copy_from_slice(tokens);
        self.set[slot] = self.set[slot].max(tokens.len());
        Ok(())
    }

    /// The first `n` tokens of a slot's window.
    pub(crate) fn window(&mut self, slot: usize, n: usize) -> Result<Vec<u32>> {
        if n > self.pitch || slot >= self.slots {
            return Err(Error::internal(format!("{n} tokens of a window of {}", self.pitch)));
        }
        if !self.fresh && n > self.set[slot] {
            let from = self.windows_at() + slot * self.pitch * 4;
            let read = self.shared.read::<u32>(from, n)?;
            let set = self.set[slot];
            self.windows[slot * self.pitch + set..slot * self.pitch + n].copy_from_slice(&read[set..]);
        }
        Ok(self.windows[slot * self.pitch..][..n].to_vec())
    }

    /// The token at an offset of a slot's window, or -1 if only the device has it.
    pub(crate) fn token(&self, slot: usize, offset: usize) -> i32 {
        let set = self.set.get(slot).is_some_and(|&set| offset < set);
        if set { self.windows[slot * self.pitch + offset] as i32 } else { -1 }
    }

    /// Call when the slot gets another sequence.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.penalties.forget(slot);
    }

    /// Sends changed samplers and new tokens of texts to the device. Returns the features that the slots' choices need.
    pub(crate) fn upload(&mut self, turns: &[Turn]) -> Result<SamplingFeatures> {
        let masks = turns.iter().any(|turn| turn.constraint.is_some());
        let mut features =
            SamplingFeatures { penalises: self.penalties.upload(turns)?, masks, ..SamplingFeatures::default() };
        for turn in turns {
            let one = self.upload_sampler(turn.slot, &turn.sampler)?;
            if one.rejects && self.draft.is_none() && turn.gamma > 0 && turn.q == DraftDistribution::Kept {
                return Err(Error::internal("rejection on a backend that was loaded without it"));
            }
            features.warm |= one.warm;
            features.rejects |= one.rejects;
        }
        Ok(features)
    }

    fn upload_sampler(&mut self, slot: usize, sampler: &Sampler) -> Result<SamplingFeatures> {
        let wanted = DeviceSampler::new(sampler);
        match self.known.get_mut(slot) {
            Some(known) if *known == Some(wanted) => {}
            Some(known) => {
                self.samplers.write(slot * SAMPLER_BYTES, &[wanted])?;
                *known = Some(wanted);
            }
            None => return Err(Error::internal(format!("slot {slot} does not exist"))),
        }
        let (warm, rejects) = (wanted.temperature != 0.0, sampler.accept == Accept::Rejection);
        Ok(SamplingFeatures { warm, rejects, ..SamplingFeatures::default() })
    }

    /// Writes the masks of a step's rows to the device, for turns with grammars. Waits for the drafted tokens before the
    /// rows.
    pub(crate) fn upload_masks(&mut self, rows: &[Row], turns: &[Turn]) -> Result<()> {
        if turns.iter().all(|turn| turn.constraint.is_none()) {
            return Ok(());
        }
        let mut masks = Vec::with_capacity(rows.len());
        for row in rows {
            let constraint = turns.iter().find(|turn| turn.slot == row.slot).and_then(|turn| turn.constraint.as_ref());
            masks.push(match constraint {
                None => None,
                Some(constraint) => constraint.mask(&self.window(row.slot, row.offset + 1)?[1..])?,
            });
        }
        self.penalties.set_masks(&masks)
    }

    /// Address of rejection's draft logits; 0 if they are not kept.
    pub(crate) fn draft_address(&self) -> u64 {
        self.draft.as_ref().map_or(0, |(logits, _)| logits.at(0))
    }

    /// The kept distribution of a slot's drafted token at `offset`: its logits, then the words of its cut as f32 bits.
    pub(crate) fn distribution(&self, slot: usize, offset: usize) -> Result<Vec<f32>> {
        let (logits, cuts, index) = self.kept(slot, offset)?;
        let mut q = logits.read::<f32>(index * self.vocab * 4, self.vocab)?;
        if q.iter().any(|logit| logit.is_nan()) {
            return Err(Error::not_finite("a draft's logits are NaN"));
        }
        q.extend(cuts.read::<f32>(index * CUT_BYTES, CUT_BYTES / 4)?);
        Ok(q)
    }

    /// Stores the result of another backend's [`Sampling::distribution`].
    pub(crate) fn set_distribution(&self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        let (logits, cuts, index) = self.kept(slot, offset)?;
        if q.len() != self.vocab + CUT_BYTES / 4 {
            return Err(Error::internal(format!("a distribution of {} words for {} tokens", q.len(), self.vocab)));
        }
        logits.write(index * self.vocab * 4, &q[..self.vocab])?;
        cuts.write(index * CUT_BYTES, &q[self.vocab..])
    }

    fn kept(&self, slot: usize, offset: usize) -> Result<(&Buffer, &Buffer, usize)> {
        match &self.draft {
            Some((logits, cuts)) if slot < self.slots && offset < GAMMA_MAX => {
                Ok((logits, cuts, slot * GAMMA_MAX + offset))
            }
            _ => Err(Error::internal(format!("no room for draft distribution {offset} of slot {slot}"))),
        }
    }

    /// Records that a draft step writes the token after `offset` of the slot's window.
    pub(crate) fn drafts(&mut self, slot: usize, offset: usize) {
        self.fresh = false;
        if let Some(set) = self.set.get_mut(slot) {
            *set = (*set).min(offset + 1);
        }
    }

    /// Queues choosing the token after every row: drafted ones, or the target's.
    fn choose(&self, drafts: bool, rows: u64, count: usize, logits: u64, features: SamplingFeatures) -> Result<()> {
        // Rejection divides by the draft's probabilities: if they are NaN, the engine takes a plain step instead.
        let only_draft = drafts && !features.rejects;
        let (vocab, flag) = (self.vocab, if only_draft { self.draft_flag() } else { self.flag() });
        let launch = |grid: [usize; 2], block: u32| Launch {
            grid: [grid[0] as u32, grid[1] as u32, 1],
            block,
            shared: 0,
            overlap: true,
        };
        let (q_logits, q_cuts) = self.draft.as_ref().map_or((0, 0), |(logits, cuts)| (logits.at(0), cuts.at(0)));
        if features.penalises {
            self.penalties.apply(rows, count, self.windows(), self.pitch, logits)?;
        }
        if features.masks {
            self.penalties.mask(count, logits)?;
        }
        // SAFETY: the argument lists are the kernels'; rows and logits are the backend's and hold `count` rows, as do the
        // buffers here.
        unsafe {
            if features.warm {
                let arguments = args![rows, &self.samplers, logits, &self.cuts, vocab, flag];
                self.device.launch(self.cut, launch([count, 1], CUT_THREADS as u32), &arguments)?;
            }
            let arguments = args![
                rows,
                &self.samplers,
                logits,
                &self.cuts,
                vocab,
                i32::from(drafts),
                &self.choices,
                self.windows(),
                self.pitch,
                q_logits,
                q_cuts,
                GAMMA_MAX,
                &self.races,
                &self.arrived,
                self.shared.at(MARGIN_AT),
                flag,
            ];
            self.device.launch(
                self.choose,
                launch([vocab.div_ceil(SAMPLE_TILE), count], SAMPLE_THREADS as u32),
                &arguments,
            )
        }
    }

    /// Queues choosing the drafted token after every row of a draft step; `features` is the result of [`Sampling::upload`].
    pub(crate) fn propose(&self, count: usize, rows: u64, logits: u64, features: SamplingFeatures) -> Result<()> {
        self.choose(true, rows, count, logits, features)
    }

    /// The logit margin of the first row's token of the last [`Sampling::propose`]; waits for it.
    pub(crate) fn margin(&mut self) -> Result<f32> {
        self.shared.read_pinned(0, &mut self.result, MARGIN_AT + 4)?;
        match self.result.bytes().get(MARGIN_AT..MARGIN_AT + 4) {
            Some(&[a, b, c, d]) => Ok(f32::from_le_bytes([a, b, c, d])),
            _ => Err(Error::internal("the round's results hold no logit margin")),
        }
    }

    /// The token after a prompt's last row, which `rows` describes.
    pub(crate) fn first(&mut self, turn: &Turn, rows: u64, logits: u64) -> Result<u32> {
        let features = self.upload(std::slice::from_ref(turn))?;
        if let Some(constraint) = &turn.constraint {
            self.penalties.set_masks(&[constraint.mask(&[])?])?;
        }
        self.choose(false, rows, 1, logits, features)?;
        let token = self.choices.read::<u32>(0, 1)?;
        token.first().copied().ok_or_else(|| Error::internal("the device chose no token"))
    }

    /// Turns in the device's format. `rows` are those of the verification.
    pub(crate) fn describe(&self, rows: &[Row], turns: &[Turn]) -> Result<Vec<DeviceTurn>> {
        if turns.len() > self.slots {
            return Err(Error::internal(format!("{} turns of {} slots", turns.len(), self.slots)));
        }
        let described = turns.iter().map(|turn| {
            let first = rows.iter().position(|row| row.slot == turn.slot);
            let first = first.ok_or_else(|| Error::internal(format!("slot {} has no rows", turn.slot)))?;
            Ok(DeviceTurn {
                slot: turn.slot as i32,
                first_row: first as i32,
                gamma: turn.gamma as i32,
                position: turn.committed as i32 + 1,
                one_hot: i32::from(turn.q == DraftDistribution::OneHot),
            })
        });
        described.collect()
    }

    /// Memory for turns that are not part of a round's description.
    pub(crate) fn turns(&self) -> &Buffer {
        &self.turns
    }

    /// Queues judging `turns` turns, described at an address, over the logits of `count` rows.
    pub(crate) fn judge(
        &self,
        described: u64,
        turns: usize,
        count: usize,
        rows: u64,
        logits: u64,
        features: SamplingFeatures,
    ) -> Result<()> {
        self.choose_all(count, rows, logits, features)?;
        self.judge_chosen(described, turns, logits)
    }

    /// Queues choosing the target's token after every row.
    pub(crate) fn choose_all(&self, count: usize, rows: u64, logits: u64, features: SamplingFeatures) -> Result<()> {
        self.choose(false, rows, count, logits, features)
    }

    /// Queues judging turns after [`Sampling::choose_all`].
    pub(crate) fn judge_chosen(&self, described: u64, turns: usize, logits: u64) -> Result<()> {
        let (q_logits, q_cuts) = self.draft.as_ref().map_or((0, 0), |(logits, cuts)| (logits.at(0), cuts.at(0)));
        let arguments = args![
            described,
            &self.samplers,
            &self.choices,
            self.windows(),
            self.pitch,
            logits,
            &self.cuts,
            self.vocab,
            q_logits,
            q_cuts,
            GAMMA_MAX,
            self.shared.at(VERDICTS_AT),
        ];
        let launch = Launch { grid: [turns as u32, 1, 1], block: CUT_THREADS as u32, shared: 0, overlap: true };
        // SAFETY: as in `choose`.
        unsafe { self.device.launch(self.judge, launch, &arguments) }
    }

    /// Waits for [`Sampling::judge`]; returns the verdicts and the error flag.
    pub(crate) fn verdicts(&mut self, turns: &[Turn]) -> Result<(Vec<Verdict>, u32)> {
        let flag = self.read()?;
        let verdicts = (0..turns.len()).map(|index| self.verdict(index)).collect::<Result<Vec<_>>>()?;
        for (verdict, turn) in verdicts.iter().zip(turns) {
            if verdict.accepted > turn.gamma || verdict.token as usize >= self.vocab {
                return Err(Error::internal(format!("verdict {verdict:?} of a turn of {}", turn.gamma)));
            }
        }
        Ok((verdicts, flag))
    }
}
