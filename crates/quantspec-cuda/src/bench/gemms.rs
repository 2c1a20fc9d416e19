//! GEMMs of a step.

use super::{Bench, Measured, filled, seconds};
use crate::draft::{DraftGemms, Heads, Hidden};
use crate::hierarchy::{Hierarchies, Hierarchy, Reads};
use crate::linear::{Linear, Matrix, Quantised, name};
use crate::prefill::padded;
use quantspec_core::Result;
use quantspec_core::cache::BUFFER_TOKENS;
use quantspec_core::config::Dtype;

impl Bench {
    /// The GEMMs of a layer and the head, with the checkpoint's weights and with draft weights.
    pub(super) fn gemms(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let linear = Linear::new(device)?;
        let hierarchies = match config.dtype {
            Dtype::F32 => None,
            dtype => Some(Hierarchies::new(device, dtype)?),
        };
        let flag = device.zeroed(4)?;
        let most = rows.iter().copied().max().unwrap_or(1);
        let shapes = [
            (config.q_width() + 2 * config.kv_width(), config.hidden, 4),
            (config.hidden, config.q_width(), 4),
            (2 * config.intermediate, config.hidden, 4),
            (config.hidden, config.intermediate, 4),
            (config.vocab, config.hidden, 8),
        ];
        let mut measured = Vec::new();
        for (n, k, bits) in shapes {
            let bytes = Matrix::bytes(config.dtype, n, k);
            let matrices: Vec<Matrix> = (0..self.copies(bytes))
                .map(|_| Ok(Matrix { buffer: filled(device, bytes)?, dtype: config.dtype, n, k }))
                .collect::<Result<_>>()?;
            let (x, y) = (filled(device, most.next_multiple_of(8) * padded(k) * 4)?, device.allocate(most * n * 4)?);
            for &rows in rows {
                let seconds = seconds(device, || {
                    // SAFETY: x has `most` rows and y room for as many.
                    matrices.iter().try_for_each(|matrix| unsafe { linear.run(matrix, x.at(0), y.at(0), rows) })
                })? / matrices.len() as f64;
                let (form, shape) = (name(config.dtype), Some((n, k)));
                measured.push(Measured { kernel: "linear", form, rows, shape, seconds, bytes, ..Measured::default() });
            }
            let quantised = self.copies(Quantised::bytes(bits, n, k));
            let drafts: Vec<Quantised> = (0..quantised)
                .map(|i| linear.quantise(&matrices[i % matrices.len()], bits, &[], 0, &flag))
                .collect::<Result<_>>()?;
            let xs = device.zeroed(most.next_multiple_of(8) * k.div_ceil(128) * 16)?;
            for &rows in rows {
                let seconds = seconds(device, || {
                    // SAFETY: as above; any bytes of x are valid codes.
                    drafts
                        .iter()
                        .try_for_each(|draft| unsafe { linear.run_quantised(draft, x.at(0), xs.at(0), y.at(0), rows) })
                })? / drafts.len() as f64;
                measured.push(Measured {
                    kernel: "linear",
                    form: if bits == 4 { "w4" } else { "w8" },
                    rows,
                    shape: Some((n, k)),
                    seconds,
                    bytes: Quantised::bytes(bits, n, k),
                    ..Measured::default()
                });
            }
            let Some(hierarchies) = &hierarchies else { continue };
            let [upper, lower] = Hierarchy::bytes(n, k);
            let nibbles: Vec<Hierarchy> = (0..self.copies(upper + lower))
                .map(|i| hierarchies.quantise(&matrices[i % matrices.len()], &[], 0, 0, &flag))
                .collect::<Result<_>>()?;
            for (reads, form, bytes) in [(Reads::All, "int8", upper + lower), (Reads::Upper, "int4", upper)] {
                for &rows in rows {
                    let seconds = seconds(device, || {
                        // SAFETY: as above.
                        nibbles.iter().try_for_each(|matrix| unsafe {
                            hierarchies.run(matrix, reads, [x.at(0), xs.at(0)], y.at(0), rows, (0, 0))
                        })
                    })? / nibbles.len() as f64;
                    let shape = Some((n, k));
                    measured.push(Measured {
                        kernel: "linear",
                        form,
                        rows,
                        shape,
                        seconds,
                        bytes,
                        ..Measured::default()
                    });
                }
            }
        }
        measured.into_iter().try_for_each(report)
    }

    /// The fused GEMMs of a draft step, if the device has them, for the rows they support. Only weights count as bytes: all
    /// else stays in the cache.
    pub(super) fn drafts(&self, rows: &[usize], report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let Some(draft) = DraftGemms::new(device, config.head_dim)? else { return Ok(()) };
        let linear = Linear::new(device)?;
        let (hidden, inner, heads) = (config.hidden, config.intermediate, config.q_width());
        let most = rows.iter().copied().max().unwrap_or(1);
        let flag = device.zeroed(4)?;
        let (stream, weight) = (device.zeroed(most * hidden * 4)?, device.zeroed(hidden * 4)?);
        let stream_at = Hidden { address: stream.at(0), weight: weight.at(0), eps: config.rms_eps, width: hidden };
        let widest = heads.max(inner).max(hidden);
        let (x, xs) = (device.zeroed(most * padded(widest) * 4)?, device.zeroed(most * widest.div_ceil(128) * 8)?);
        let q = device.allocate(most * (heads + 2 * config.kv_width()) * 4)?;
        let ring = || device.zeroed(config.kv_width() * BUFFER_TOKENS * 2);
        let (ring_k, ring_v) = (ring()?, ring()?);
        // Descriptions of rows are zero: slot 0, position 0.
        let (described, angles) = (device.zeroed(most * 16)?, device.zeroed(most * config.head_dim * 4)?);
        let to = Heads {
            rows: described.at(0),
            bias: 0,
            cos_sin: angles.at(0),
            q: q.at(0),
            rings: [ring_k.at(0), ring_v.at(0)],
            scale: 1.0,
            heads: [config.heads, config.kv_heads],
            layer: 0,
            slots: 1,
            flag: flag.at(0),
        };
        let shapes = [
            ("heads", heads + 2 * config.kv_width(), hidden),
            ("add i8", hidden, heads),
            ("gated", 2 * inner, hidden),
            ("add bf16", hidden, inner),
        ];
        for (form, n, k) in shapes {
            let paired = if form == "heads" { config.head_dim } else { 0 };
            let full = Matrix { buffer: filled(device, Matrix::bytes(config.dtype, n, k))?, dtype: config.dtype, n, k };
            let bytes = Quantised::bytes(4, n, k);
            let drafts: Vec<Quantised> = (0..self.copies(bytes))
                .map(|_| linear.quantise(&full, 4, &[], paired, &flag))
                .collect::<Result<_>>()?;
            for &rows in rows.iter().filter(|&&rows| draft.takes(widest, rows)) {
                let seconds = seconds(device, || {
                    // SAFETY: every buffer has room for `most` rows and outlives the graph.
                    drafts.iter().try_for_each(|weights| unsafe {
                        match form {
                            "heads" => draft.heads(weights, stream_at, &to, rows),
                            "add i8" => draft.add_i8(weights, x.at(0), xs.at(0), stream.at(0), 0, rows),
                            "gated" => draft.gated(weights, stream_at, 0, x.at(0), padded(inner), rows),
                            _ => draft.add_bf16(weights, x.at(0), padded(inner), stream.at(0), 0, rows),
                        }
                    })
                })? / drafts.len() as f64;
                let shape = Some((n, k));
                report(Measured { kernel: "draft", form, rows, shape, seconds, bytes, ..Measured::default() })?;
            }
        }
        Ok(())
    }
}
