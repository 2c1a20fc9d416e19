//! A block of a prompt.

use super::{Bench, Measured, filled, seconds};
use crate::linear::{Matrix, name};
use crate::prefill::{Prefill, Shape, padded, readable};
use quantspec_core::Result;
use quantspec_model::backend::Branch;

/// Rows of the timed prefill block.
const PREFILL_ROWS: usize = 2048;

impl Bench {
    /// A block of a prompt: its GEMMs with all fused operations, and its attention.
    pub(super) fn prompt(&self, contexts: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config, rows) = (&self.device, &self.config, PREFILL_ROWS);
        let shape = Shape::of(config);
        let (d, dtype, form) = (config.head_dim, config.dtype, name(config.dtype));
        let prefill = Prefill::new(device, shape, rows)?;
        let (q_width, kv_width) = (config.q_width(), 2 * config.kv_width());
        let widest = config.hidden.max(q_width).max(config.intermediate);
        let x = filled(device, readable(rows) * padded(widest) * dtype.bytes())?;
        let (out, q) = (device.allocate(x.bytes())?, device.allocate(rows * q_width * 2)?);
        let (hidden, angles) = (device.zeroed(rows * config.hidden * 4)?, device.zeroed(rows * d / 2 * 8)?);
        let most = contexts.iter().copied().max().unwrap_or(0) + rows;
        let (kv, flag) = (filled(device, most * kv_width * 2)?, device.zeroed(4)?);
        let weights = |n: usize, k: usize| filled(device, Matrix::bytes(dtype, n, k)).map(|buffer| (buffer, n, k));
        let gemms = [
            ("prefill_qkv", weights(q_width + kv_width, config.hidden)?),
            ("prefill_output", weights(config.hidden, q_width)?),
            ("prefill_gate_up", weights(2 * config.intermediate, config.hidden)?),
            ("prefill_down", weights(config.hidden, config.intermediate)?),
        ];
        for (kernel, (weights, n, k)) in &gemms {
            let (n, k, w) = (*n, *k, weights.at(0));
            let took = seconds(device, || {
                // SAFETY: all buffers have room for the block, and live until the measurement is done.
                unsafe {
                    match *kernel {
                        "prefill_qkv" => {
                            prefill.qkv(x.at(0), w, None, None, angles.at(0), q.at(0), kv.at(0), flag.at(0), rows)
                        }
                        "prefill_output" => prefill.add(Branch::Attention, x.at(0), w, [None; 2], hidden.at(0), rows),
                        "prefill_gate_up" => prefill.gate_up(x.at(0), w, None, out.at(0), rows),
                        _ => prefill.add(Branch::Mlp, x.at(0), w, [None; 2], hidden.at(0), rows),
                    }
                }
            })?;
            report(Measured {
                kernel,
                form,
                rows,
                shape: Some((n, k)),
                seconds: took,
                bytes: weights.bytes() + rows * (k + n) * dtype.bytes(),
                operations: Some(2.0 * rows as f64 * n as f64 * k as f64),
                ..Measured::default()
            })?;
        }
        for &context in contexts {
            let took = seconds(device, || {
                // SAFETY: as above; kv has room for the context and the block.
                unsafe { prefill.attend(q.at(0), kv.at(0), out.at(0), context, rows, None) }
            })?;
            // Scores and weighted sums over the mean number of visible tokens.
            let seen = context as f64 + (rows as f64 + 1.0) / 2.0;
            report(Measured {
                kernel: "prefill_attend",
                form,
                rows,
                context: Some(context),
                seconds: took,
                bytes: (context + rows) * kv_width * 2 + rows * q_width * (2 + dtype.bytes()),
                operations: Some(4.0 * rows as f64 * seen * q_width as f64),
                ..Measured::default()
            })?;
        }
        Ok(())
    }
}
