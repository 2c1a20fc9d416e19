//! The network's operations on the rows of a prompt.

use super::CudaBackend;
use super::gemm::NORM_THREADS;
use super::workspace::{angle_tables, scratch_bytes, unrotated_rows};
use crate::args;
use crate::device::{Buffer, Launch};
use crate::masses::PageMasses;
use crate::prefill::padded;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Block, Branch};
use std::time::{Duration, Instant};

/// Interval between checks of a busy device, short compared with a layer of a long prompt.
const POLL_EVERY: Duration = Duration::from_micros(200);
/// Time for which the device is checked without a pause: a layer of a short prompt takes less, and a pause would leave the device
/// idle.
const CHECK_FOR: Duration = Duration::from_millis(2);

impl CudaBackend {
    /// Memory of the current prompt's keys and values.
    pub(super) fn prompt_kv(&self) -> &Buffer {
        self.weights.lent().filter(|_| self.prompt.borrows).unwrap_or(&self.prompt.scratch)
    }

    /// Address of a prompt row's keys and values.
    pub(super) fn prompt_scratch(&self, row: usize) -> u64 {
        self.prompt_kv().at(scratch_bytes(&self.config, row))
    }

    /// Offset of a row of a table of angles. The tables for positions (`angle_tables`) come first, each with as many rows as the
    /// longest prompt. The rows for layers without position embedding follow.
    fn angle_offset(&self, table: usize, row: usize) -> usize {
        (table * self.options.prompt_capacity.max(1) + row) * self.config.head_dim / 2 * 8
    }

    /// Address of the angles of a block's or a step's rows in a layer: the second of `own` in a local layer, the first in others.
    /// Layers without position embedding have angles of zero.
    pub(super) fn angles(&self, layer: usize, own: [u64; 2]) -> u64 {
        if !self.config.rotates(layer) {
            return self.prompt.cos_sin.at(self.angle_offset(angle_tables(&self.config), 0));
        }
        own[usize::from(self.config.reach(layer).is_some())]
    }

    /// Writes the angles of layers without position embedding.
    pub(super) fn write_unrotated(&mut self) -> Result<()> {
        let (rows, half) = (unrotated_rows(&self.config, &self.options), self.config.head_dim / 2);
        if rows == 0 {
            return Ok(());
        }
        let (mut cos, mut sin) = (vec![0.0f32; rows * half], vec![0.0f32; rows * half]);
        self.rope.fill_unrotated(&mut cos, &mut sin);
        let angles: Vec<f32> = cos.into_iter().zip(sin).flat_map(|(c, s)| [c, s]).collect();
        self.prompt.cos_sin.write(self.angle_offset(angle_tables(&self.config), 0), &angles)
    }

    /// Waits for the device; the caller may interrupt.
    pub(super) fn wait(&mut self) -> Result<()> {
        let started = Instant::now();
        while !self.device.idle()? {
            if started.elapsed() > CHECK_FOR {
                (self.hooks.poll)()?;
                std::thread::sleep(POLL_EVERY);
            }
        }
        self.staged = 0;
        Ok(())
    }

    pub(super) fn prompt_embed(&mut self, block: &Block) -> Result<()> {
        let end = block.start + block.rows;
        if block.prompt.len() > self.options.prompt_capacity || end > block.prompt.len() {
            return Err(Error::internal(format!(
                "a prompt of {} tokens; {} fit",
                block.prompt.len(),
                self.options.prompt_capacity
            )));
        }
        self.restore_head()?;
        self.prompt.borrows = block.prompt.len() > self.prompt.own;
        self.prompt.hidden.embed(block)?;
        self.prompting = true;
        self.masses.iter_mut().for_each(PageMasses::clear);
        self.prompt.tokens.write(block.start * 4, &block.prompt[block.start..end])?;
        let half = self.config.head_dim / 2;
        let mut angles = vec![0.0f32; block.rows * half * 2];
        let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
        for (table, rope) in [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten().enumerate() {
            for (row, out) in angles.chunks_mut(half * 2).enumerate() {
                rope.fill(block.start + row, block.prompt.len(), &mut cos, &mut sin);
                for (pair, (c, s)) in out.chunks_mut(2).zip(cos.iter().zip(&sin)) {
                    pair.copy_from_slice(&[*c, *s]);
                }
            }
            self.prompt.cos_sin.write(self.angle_offset(table, block.start), &angles)?;
        }
        let tokens = self.prompt.tokens.at(block.start * 4);
        let launch = Launch { grid: [block.rows as u32, 1, 1], block: 256, shared: 0, overlap: true };
        // SAFETY: tokens and hidden states have room for the prompt.
        unsafe { self.launch_embed(launch, [0, 0, 0, tokens], self.prompt.hidden.at(block.start)?)? };
        // Embedding may read the head, which keys and values overwrite only after the last block.
        self.overwritten |= self.prompt.borrows && end == block.prompt.len();
        Ok(())
    }

    /// RMSNorm of a block's hidden states into the input of its GEMM, or the states as they are if there is no norm.
    pub(super) fn prompt_norm(&self, block: &Block, weight: Option<&Buffer>) -> Result<()> {
        let (width, pitch) = (self.config.hidden, padded(self.config.hidden));
        let Some(weight) = weight else {
            let arguments = args![self.prompt.hidden.at(block.start)?, &self.prompt.normed, width, pitch, 0usize];
            return self.launch(self.kernels.convert.plain, [width.div_ceil(1024), block.rows, 1], 256, 0, &arguments);
        };
        let arguments = args![
            self.prompt.hidden.at(block.start)?,
            0u64,
            0u64,
            weight,
            &self.prompt.normed,
            self.config.rms_eps,
            width,
            pitch,
            0usize
        ];
        self.launch(self.kernels.norm[0].plain, [block.rows, 1, 1], NORM_THREADS, 0, &arguments)
    }

    pub(super) fn prompt_qkv(&mut self, layer: usize, block: &Block) -> Result<()> {
        self.prompt.hidden.enter(block)?;
        let [matrix, ..] = self.prompt_matrices(layer)?;
        let weights = self.layer(layer)?;
        self.prompt_norm(block, weights.attention_norm.as_ref())?;
        let norms = weights.qk_norms.as_ref().map(|(q, k)| (q.at(0), k.at(0)));
        let bias = weights.qkv_bias.as_ref().map(|bias| bias.at(0));
        let prompt = &self.prompt;
        let tables = [0, angle_tables(&self.config) - 1];
        let cos_sin = self.angles(layer, tables.map(|table| prompt.cos_sin.at(self.angle_offset(table, block.start))));
        let kv = self.prompt_scratch(block.start);
        // SAFETY: the buffers are this backend's and have room for `block_rows` rows and `prompt_capacity` tokens.
        unsafe {
            self.prefill.qkv(
                prompt.normed.at(0),
                matrix,
                bias,
                norms,
                cos_sin,
                prompt.q.at(0),
                kv,
                self.sampling.flag(),
                block.rows,
            )?;
        }
        self.scale_queries(&prompt.q, 0, block.start, block.rows)?;
        let (q, kv) = (self.prompt.q.at(0), self.prompt_scratch(0));
        // SAFETY: the buffers live as long as this backend.
        self.masses.as_mut().map_or(Ok(()), |masses| unsafe { masses.add_queries(block, q, kv) })
    }

    /// The last projection of a branch, added to the hidden states.
    pub(super) fn prompt_add(&mut self, layer: usize, branch: Branch, block: &Block) -> Result<()> {
        let [_, output, _, down] = self.prompt_matrices(layer)?;
        let (weights, prompt) = (self.layer(layer)?, &self.prompt);
        let (x, matrix, vectors) = match branch {
            Branch::Attention => (&prompt.attended, output, [&weights.output_bias, &weights.attention_output_norm]),
            Branch::Mlp => (&prompt.gated, down, [&weights.down_bias, &weights.mlp_output_norm]),
        };
        let bias_and_norm = vectors.map(|vector| vector.as_ref().map(|vector| vector.at(0)));
        let hidden = prompt.hidden.at(block.start)?;
        // SAFETY: as in `prompt_qkv`.
        unsafe { self.prefill.add(branch, x.at(0), matrix, bias_and_norm, hidden, block.rows) }
    }
}
