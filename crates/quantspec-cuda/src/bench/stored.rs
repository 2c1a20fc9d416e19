//! Quantising pages, storing recent tokens, and loading weights.

use super::{Bench, Measured, filled, seconds};
use crate::args;
use crate::backend::page_shared;
use crate::linear::{Linear, Matrix, Quantised, name};
use quantspec_core::Result;
use quantspec_core::cache::{BUFFER_TOKENS, G};
use quantspec_core::config::Dtype;
use quantspec_core::layout::Layout;

impl Bench {
    /// Quantising: one page of a sequence in all layers, from the ring; many pages of one layer, from a prompt.
    pub(super) fn pages(&self, report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        const PAGES: usize = 64;
        let (device, config) = (&self.device, &self.config);
        let (d, heads, layers) = (config.head_dim, config.kv_heads, config.layers);
        let (upper, lower) = (Layout::Cuda.upper_bytes(d), Layout::Cuda.lower_bytes(d));
        let shared = page_shared(d);
        let (flush, store) =
            (device.kernel(&format!("flush_{d}"), shared)?, device.kernel(&format!("store_{d}"), shared)?);
        let ring = filled(device, layers * heads * BUFFER_TOKENS * d * 2)?;
        let scratch = filled(device, PAGES * G * 2 * heads * d * 2)?;
        let blocks = (layers.max(PAGES)) * heads;
        let (upper_pool, lower_pool) = (device.allocate(blocks * upper)?, device.allocate(blocks * lower)?);
        let table = device.copied(&(0..PAGES as i32).collect::<Vec<_>>())?;
        let flag = device.zeroed(4)?;
        for (form, balanced) in [("balanced", 1usize), ("paper", 0)] {
            let moved = 4 * G * d + upper + lower;
            let arguments = args![
                &ring,
                &ring,
                &upper_pool,
                &lower_pool,
                0u64,
                1usize,
                1usize,
                0usize,
                0usize,
                0usize,
                balanced,
                &flag
            ];
            let took = seconds(device, || self.launch(flush, [heads, layers, 2], 256, shared, &arguments))?;
            let bytes = layers * heads * moved;
            report(Measured { kernel: "flush", form, rows: G, seconds: took, bytes, ..Measured::default() })?;
            let arguments = args![&scratch, &upper_pool, &lower_pool, 0u64, &table, 0usize, balanced, &flag];
            let took = seconds(device, || self.launch(store, [heads, PAGES, 2], 256, shared, &arguments))?;
            let bytes = PAGES * heads * moved;
            report(Measured { kernel: "store", form, rows: PAGES * G, seconds: took, bytes, ..Measured::default() })?;
        }
        let keep = device.kernel("keep_recent", 0)?;
        let arguments = args![&scratch, &ring, &ring, 0usize, 1usize, 0usize, heads, d, 0usize, &flag];
        let took = seconds(device, || self.launch(keep, [BUFFER_TOKENS, 2, 1], 128, 0, &arguments))?;
        let (rows, bytes) = (BUFFER_TOKENS, 2 * BUFFER_TOKENS * 2 * heads * d * 2);
        report(Measured { kernel: "keep_recent", form: "f16", rows, seconds: took, bytes, ..Measured::default() })
    }

    /// Kernels of loading: reordering a matrix, and making draft weights of it.
    pub(super) fn weights(&self, report: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
        let (device, config) = (&self.device, &self.config);
        let linear = Linear::new(device)?;
        let flag = device.zeroed(4)?;
        let (n, k, dtype) = (2 * config.intermediate, config.hidden, config.dtype);
        let bytes = Matrix::bytes(dtype, n, k);
        let from = filled(device, bytes)?;
        let matrix = Matrix { buffer: filled(device, bytes)?, dtype, n, k };
        let shape = Some((n, k));
        let (order, elements) = match dtype {
            Dtype::F32 => ("weights_rows", n * k),
            Dtype::Bf16 | Dtype::F16 => ("weights_atoms", n * k.div_ceil(8)),
        };
        let kernel = device.kernel(order, 0)?;
        let arguments = args![&from, &matrix.buffer, 0usize, n, k, 0usize];
        let took = seconds(device, || self.launch(kernel, [elements.div_ceil(256), 1, 1], 256, 0, &arguments))?;
        let (form, moved) = (name(dtype), 2 * bytes);
        report(Measured { kernel: order, form, rows: n, shape, seconds: took, bytes: moved, ..Measured::default() })?;
        for (form, bits) in [("w4", 4), ("w8", 8)] {
            let draft = linear.quantise(&matrix, bits, &vec![1.0; matrix.k], 0, &flag)?;
            let took = seconds(device, || linear.quantise_into(&matrix, &draft, &flag))?;
            let bytes = bytes + Quantised::bytes(bits, n, k);
            let kernel = "quantise_weights";
            report(Measured { kernel, form, rows: n, shape, seconds: took, bytes, ..Measured::default() })?;
        }
        Ok(())
    }
}
