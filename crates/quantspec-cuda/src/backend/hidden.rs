//! Hidden states of a prompt, f32 `[tokens][hidden]`. Prefill is layer-major, so it keeps those of every token between layers.
//!
//! Short prompts keep them on the device. Those of long prompts are in host memory, and the device has places for two blocks.
//! While one block is computed, the block before it is copied out of the other place, and the block after it into that place:
//!
//! ```text
//! work     block 1         block 2         block 3
//! copies   0 out, 2 in     1 out, 3 in     2 out, 4 in
//! ```
//!
//! Blocks are copied in pieces, so that both directions of the bus are used at once. Copies may still run after a prompt has
//! ended or was cancelled, so the work of every prompt waits for them, also of a short one.

use super::workspace::Limits;
use crate::device::{Buffer, Copies, Device, Pinned};
use quantspec_core::config::ModelConfig;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Block, Options};
use std::ops::Range;
use std::sync::Arc;

/// Pieces of a block.
const PIECES: usize = 4;

/// Hidden states of the current prompt.
#[derive(Debug)]
pub(super) struct HiddenStates {
    /// Host memory for prompts too long for `rows`. It is the first field, so that copies end before their memory is freed.
    host: Option<(Copies, Pinned)>,
    /// All hidden states of a short prompt, or two places of a long one.
    rows: Buffer,
    /// Bytes of a row.
    pitch: usize,
    /// Bytes of a place.
    place: usize,
    /// The current prompt is in host memory.
    streams: bool,
    /// The place of the current block, and the rows in it.
    current: usize,
    here: Range<usize>,
    /// Rows on their way to the other place; none if empty.
    ahead: Range<usize>,
}

impl HiddenStates {
    /// Bytes on the device and in host memory.
    pub(super) fn bytes(config: &ModelConfig, options: &Options, limits: Limits) -> [usize; 2] {
        let pitch = config.hidden * size_of::<f32>();
        let all = options.prompt_capacity.max(1) * pitch;
        if all <= limits.hidden_bytes {
            return [all, 0];
        }
        // Shorter prompts stay on the device in such an engine, too.
        let kept = (2 * options.block_rows.max(1) * pitch).max(limits.hidden_bytes / 2);
        if all <= kept { [all, 0] } else { [kept, all] }
    }

    pub(super) fn new(
        device: &Arc<Device>,
        config: &ModelConfig,
        options: &Options,
        limits: Limits,
    ) -> Result<HiddenStates> {
        let [on_device, in_host] = HiddenStates::bytes(config, options, limits);
        let pitch = config.hidden * size_of::<f32>();
        Ok(HiddenStates {
            host: if in_host > 0 { Some((Copies::new(device)?, device.pinned(in_host)?)) } else { None },
            rows: device.allocate(on_device)?,
            pitch,
            place: options.block_rows.max(1) * pitch,
            streams: false,
            current: 0,
            here: 0..0,
            ahead: 0..0,
        })
    }

    /// Bytes held on the device and in host memory.
    pub(super) fn held_bytes(&self) -> [usize; 2] {
        [self.rows.bytes(), self.host.as_ref().map_or(0, |(_, host)| host.size())]
    }

    /// Address of a row of the current block.
    pub(super) fn at(&self, row: usize) -> Result<u64> {
        let offset = match self.streams {
            false => row * self.pitch,
            true if self.here.contains(&row) => self.current * self.place + (row - self.here.start) * self.pitch,
            true => return Err(Error::internal(format!("prompt row {row} outside the current block {:?}", self.here))),
        };
        Ok(self.rows.at(offset))
    }

    /// Makes a block the current one, whose rows the work queued next writes.
    pub(super) fn embed(&mut self, block: &Block) -> Result<()> {
        let rows = block.start..block.start + block.rows;
        if block.start == block.first {
            self.streams = block.prompt.len() * self.pitch > self.rows.bytes();
            self.here = 0..0;
        }
        let Some((copies, _)) = self.streamed(block)? else {
            // Rows of an earlier prompt may still be on their way to this memory.
            return self.host.as_ref().map_or(Ok(()), |(copies, _)| copies.work_waits());
        };
        copies.wait_for_work()?;
        self.copy_out(&self.here)?;
        // The other place was copied out before the last block.
        copies.work_waits()?;
        copies.record()?;
        (self.current, self.here, self.ahead) = (1 - self.current, rows, 0..0);
        Ok(())
    }

    /// Makes a block of a layer the current one, with the rows that it had after the layer before.
    pub(super) fn enter(&mut self, block: &Block) -> Result<()> {
        let rows = block.start..block.start + block.rows;
        let Some((copies, _)) = self.streamed(block)? else { return Ok(()) };
        // Also a part of it: the last layer computes the rows before the last page on their own.
        if self.here.start <= rows.start && rows.end <= self.here.end {
            return Ok(());
        }
        copies.wait_for_work()?;
        let other = 1 - self.current;
        if self.ahead != rows {
            self.copy_in(other, &rows, &rows)?;
            copies.record()?;
        }
        copies.work_waits()?;
        let most = self.place / self.pitch;
        // After the last block of a layer, the first one of the next.
        let start = if rows.end < block.prompt.len() { rows.end } else { block.first };
        let next = start..(start + most).min(block.prompt.len());
        let size = most.div_ceil(PIECES);
        for at in (0..most).step_by(size) {
            let piece = |rows: &Range<usize>| (rows.start + at).min(rows.end)..(rows.start + at + size).min(rows.end);
            self.copy_out(&piece(&self.here))?;
            copies.uploads_wait_for_downloads()?;
            self.copy_in(self.current, &next, &piece(&next))?;
        }
        copies.record()?;
        (self.current, self.here, self.ahead) = (other, rows, next);
        Ok(())
    }

    /// Copies and host memory, if the current prompt streams.
    fn streamed(&self, block: &Block) -> Result<Option<&(Copies, Pinned)>> {
        if !self.streams {
            return Ok(None);
        }
        match &self.host {
            Some(host) if block.rows * self.pitch <= self.place => Ok(Some(host)),
            _ => Err(Error::internal(format!("{} of {} prompt rows in one block", block.rows, block.prompt.len()))),
        }
    }

    /// Queues copying a piece of the current block to host memory.
    fn copy_out(&self, piece: &Range<usize>) -> Result<()> {
        let (Some((copies, host)), false) = (&self.host, piece.is_empty()) else { return Ok(()) };
        let place = self.current * self.place + (piece.start - self.here.start) * self.pitch;
        // SAFETY: `self` owns both memories and drops the streams first. The copy waits for the work on the block; later work on
        // this place waits for the copy.
        unsafe { copies.to_host((&self.rows, place), (host, piece.start * self.pitch), piece.len() * self.pitch) }
    }

    /// Queues copying a piece of a block from host memory to its place.
    fn copy_in(&self, to: usize, block: &Range<usize>, piece: &Range<usize>) -> Result<()> {
        let (Some((copies, host)), false) = (&self.host, piece.is_empty()) else { return Ok(()) };
        let place = to * self.place + (piece.start - block.start) * self.pitch;
        // SAFETY: as in `copy_out`; the copy waits for copies of what the place held.
        unsafe { copies.to_device((&self.rows, place), (host, piece.start * self.pitch), piece.len() * self.pitch) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#[allow(clippy::print_stderr, reason = "a skipped test must say so")]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_short_prompt_waits_for_copies_of_a_long_one() {
        let device = match Device::open(0) {
            Ok(device) => device,
            Err(error) => {
                assert!(std::env::var_os("QUANTSPEC_REQUIRE_GPU").is_none(), "no GPU: {}", error.message);
                return eprintln!("SKIPPED, no GPU: {}", error.message);
            }
        };
        let config = br#"{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 1, "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "torch_dtype": "bfloat16"}"#;
        let config = quantspec_model::config::parse(config, None).unwrap();
        let options = Options { block_rows: 4096, ..Options::new(1, 16_384) };
        let limits = Limits { hidden_bytes: 0, ..Limits::default() };
        let mut hidden = HiddenStates::new(&device, &config, &options, limits).unwrap();
        let long = vec![0; 16_384];
        let block = |start| Block { slot: 0, prompt: &long, first: 0, start, rows: 4096 };
        for blocks in 1..=4 {
            for start in [0, 4096, 8192, 12_288] {
                hidden.embed(&block(start)).unwrap();
            }
            // 128 MiB are on their way in both directions.
            (0..blocks).for_each(|index| hidden.enter(&block(index * 4096)).unwrap());
            hidden.embed(&Block { slot: 0, prompt: &long[..100], first: 0, start: 0, rows: 100 }).unwrap();
            hidden.rows.fill(0x7f).unwrap();
            device.synchronize().unwrap();
            std::thread::sleep(Duration::from_millis(200));
            let bytes = hidden.rows.read::<u8>(0, hidden.rows.bytes()).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0x7f), "after {blocks} blocks of another prompt");
        }
    }
}
