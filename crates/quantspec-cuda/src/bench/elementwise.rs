//! Operations between the GEMMs of a step, and at both of its ends.

use super::{Bench, Measured, filled, repeated};
use crate::args;
use crate::backend::NORM_THREADS;
use crate::linear::{Matrix, name};
use crate::prefill::{activate_mul, padded};
use crate::sample::Sampling;
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G, GAMMA_MAX};
use quantspec_core::sample::{Accept, Sampler};
use quantspec_model::backend::{Row, Turn};

impl Bench {
    /// The operations between a layer's GEMMs, for 16-bit GEMMs and for draft GEMMs. Their buffers stay in the cache, as in a
    /// step.
    pub(super) fn small(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (hidden, width, dtype) = (config.hidden, config.intermediate, name(config.dtype));
        let (d, q_width, kv_width) = (config.head_dim, config.q_width(), config.kv_width());
        let most = rows.iter().copied().max().unwrap_or(1);
        let kernel = |name: &str| device.kernel(name, 0);
        let stem = activate_mul(config.activation);
        // Forms of a GEMM's input, and their bytes per number.
        let forms = [(dtype, config.dtype.bytes()), ("i8", 1), ("limbs", 2)];
        let append = kernel(&format!("append_{d}"))?;
        let widest = (2 * width).max(hidden).max(q_width + 2 * kv_width);
        let (stream, y) = (device.zeroed(most * hidden * 4)?, device.zeroed(most * widest * 4)?);
        let (weight, x) = (device.zeroed(hidden * 4)?, device.zeroed(most * padded(width.max(hidden)) * 4)?);
        let xs = device.zeroed(most * width.max(hidden).div_ceil(G) * 16)?;
        // Descriptions of rows are zero: slot 0, position 0.
        let (described, angles, flag) = (device.zeroed(most * 16)?, device.zeroed(most * d * 4)?, device.zeroed(4)?);
        let (q, ring) = (device.allocate(most * q_width * 2)?, device.zeroed(2 * kv_width * BUFFER_TOKENS * 2)?);
        let (ring_k, ring_v) = (ring.at(0), ring.at(kv_width * BUFFER_TOKENS * 2));
        for &rows in rows {
            let timed = |kernel, form, seconds, bytes| Measured::of(kernel, form, rows, seconds, bytes);
            let eps = config.rms_eps;
            let full = args![&stream, &y, 0u64, &weight, &x, eps, hidden, padded(hidden), 0usize];
            let codes = args![&stream, &y, 0u64, &weight, &x, &xs, eps, hidden, 0usize];
            for (form, out) in forms {
                let (norm, arguments) =
                    (kernel(&format!("norm_{form}"))?, if form == dtype { &full[..] } else { &codes });
                let took = self.called(|| self.launch(norm, [rows, 1, 1], NORM_THREADS, 0, arguments))?;
                report(timed("norm", form, took, hidden * (4 + rows * (12 + out))))?;
            }
            let full = args![&y, 0u64, &x, width, padded(width), 0usize];
            let codes = args![&y, 0u64, &x, &xs, width, 0usize];
            let grid = [width.div_ceil(1024), rows, 1];
            for (form, out) in forms {
                let (gated, arguments) =
                    (kernel(&format!("{stem}_{form}"))?, if form == dtype { &full[..] } else { &codes });
                let took = self.called(|| self.launch(gated, grid, 256, 0, arguments))?;
                report(timed("silu", form, took, rows * width * (8 + out)))?;
            }
            let arguments = args![
                &described,
                &y,
                0u64,
                0u64,
                0u64,
                &angles,
                &q,
                ring_k,
                ring_v,
                eps,
                1.0f32,
                config.heads,
                config.kv_heads,
                0usize,
                1usize,
                0usize,
                &flag
            ];
            let grid = [(config.heads + 2 * config.kv_heads).div_ceil(4), rows, 1];
            let took = self.called(|| self.launch(append, grid, 128, 0, &arguments))?;
            report(timed("append", "f16", took, rows * (6 * (q_width + 2 * kv_width) + 4 * d)))?;
        }
        Ok(())
    }

    /// Start and end of a step: the embedding, and choosing and judging tokens, for one sequence's rows. Their buffers stay
    /// in the cache, too.
    pub(super) fn ends(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let (hidden, vocab) = (config.hidden, config.vocab);
        let most = rows.iter().copied().max().unwrap_or(1);
        let embed = device.kernel(&format!("embed_{}", name(config.dtype)), 0)?;
        let table = filled(device, Matrix::bytes(config.dtype, vocab, hidden))?;
        // Logits of a usual spread: sums of four uniform numbers with a total range of 10.
        let even = |i: u32, seed: u32| {
            (i.wrapping_mul(4).wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32
        };
        let pattern: Vec<f32> =
            (0..vocab as u32).map(|i| (0..4).map(|seed| 10.0 * even(i, seed)).sum::<f32>()).collect();
        let logits = repeated(device, &device.copied(&pattern)?, most * vocab * 4)?;
        let stream = device.zeroed(most * hidden * 4)?;
        let described = device.zeroed(most * 16)?;
        let mut sampling = Sampling::new(device, vocab, 1, most, most.max(2), 1, false)?;
        for &rows in rows {
            let timed = |kernel, form, seconds, bytes| Measured::of(kernel, form, rows, seconds, bytes);
            let (windows, pitch) = (sampling.windows(), sampling.pitch());
            let arguments = args![&described, windows, pitch, 0u64, &table, &stream, hidden, vocab, 1.0f32];
            let took = self.called(|| self.launch(embed, [rows, 1, 1], 256, 0, &arguments))?;
            report(timed("embed", name(config.dtype), took, rows * hidden * (4 + config.dtype.bytes())))?;
            let warm = Sampler { temperature: 1.0, top_p: 0.95, accept: Accept::Replay, ..Sampler::greedy() };
            for (form, sampler) in [("greedy", Sampler::greedy()), ("replay", warm)] {
                let turns = [Turn::new(0, 0, (rows - 1).min(GAMMA_MAX), sampler)];
                let features = sampling.upload(&turns)?;
                let step: Vec<Row> = (0..rows).map(|offset| Row { slot: 0, offset, position: offset }).collect();
                sampling.turns().write(0, &sampling.describe(&step, &turns)?)?;
                let took = self.called(|| sampling.choose_all(rows, described.at(0), logits.at(0), features))?;
                report(timed("choose", form, took, rows * vocab * 4))?;
                let took = self.called(|| sampling.judge_chosen(sampling.turns().at(0), 1, logits.at(0)))?;
                report(timed("judge", form, took, 4 * rows))?;
            }
        }
        Ok(())
    }
}
