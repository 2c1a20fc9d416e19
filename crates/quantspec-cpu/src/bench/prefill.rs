//! GEMMs and attention of prompt rows.

use super::Machine;
use crate::causal::{self, Causal};
use crate::dispatch::Simd;
use crate::elementwise::PANEL_TOKENS;
use crate::linear::Matrix;
use crate::memory::Array;
use crate::panel::PANEL;
use crate::pool::Pool;
use crate::prefill::{self, Format};
use quantspec_core::Result;
use quantspec_core::config::Dtype;

/// A GEMM for `tokens` prompt rows.
pub struct PromptMatrix {
    simd: Simd,
    pool: Pool,
    matrix: Matrix,
    x: Array<f32>,
    y: Array<f32>,
    panels: usize,
}

impl PromptMatrix {
    /// Zeros, which take the same time. `n` is a multiple of 32, `tokens` of 64.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(
        Machine { simd, threads }: Machine,
        n: usize,
        k: usize,
        tokens: usize,
        dtype: Dtype,
    ) -> Result<PromptMatrix> {
        let panels = tokens / PANEL_TOKENS;
        Ok(PromptMatrix {
            simd,
            pool: Pool::new(threads)?,
            matrix: Matrix::zeros(n / PANEL, k, dtype)?,
            x: Array::zeros(panels * prefill::panel_len(k))?,
            y: Array::zeros(tokens * n)?,
            panels,
        })
    }

    /// Floating-point operations of a call.
    pub fn flops(&self) -> usize {
        2 * self.matrix.panels * PANEL * self.matrix.k * self.panels * PANEL_TOKENS
    }

    /// Multiplies by the next matrix.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let PromptMatrix { simd, pool, matrix, x, y, panels } = self;
        prefill::gemm(pool, *simd, &mut || Ok(()), matrix, x, y, *panels)
    }
}

/// Causal attention of a block of prompt rows after `before` tokens.
pub struct PromptAttention {
    simd: Simd,
    format: Format,
    pool: Pool,
    heads: usize,
    group: usize,
    d: usize,
    q: Array<f32>,
    keys: Array<u16>,
    values: Array<u16>,
    out: Array<f32>,
    scratch: Vec<causal::Scratch>,
    first: usize,
    panels: usize,
}

impl PromptAttention {
    /// Zeros, which take the same time. `before` and `rows` are multiples of 64, `d` of 32. `dtype`: of the output
    /// projection.
    ///
    /// # Errors
    /// If memory is short or threads cannot start.
    pub fn new(
        Machine { simd, threads }: Machine,
        (heads, group, d): (usize, usize, usize),
        before: usize,
        rows: usize,
        dtype: Dtype,
    ) -> Result<PromptAttention> {
        let (panels, tokens) = (rows / PANEL_TOKENS, before + rows);
        let halves = || Array::zeros(heads / group * tokens * d + 16);
        Ok(PromptAttention {
            simd,
            format: Format::of(simd, &Matrix::zeros(1, heads * d, dtype)?),
            pool: Pool::new(threads)?,
            heads,
            group,
            d,
            q: Array::zeros(panels * heads * prefill::panel_len(d))?,
            keys: halves()?,
            values: halves()?,
            out: Array::zeros(panels * prefill::panel_len(heads * d))?,
            scratch: (0..threads).map(|_| causal::Scratch::new(d, group)).collect::<Result<_>>()?,
            first: before / PANEL_TOKENS,
            panels,
        })
    }

    /// Floating-point operations of a call: both GEMMs over the keys each query sees.
    pub fn flops(&self) -> usize {
        let (before, rows) = (self.first * PANEL_TOKENS, self.panels * PANEL_TOKENS);
        4 * self.heads * self.d * (rows * before + rows * (rows + 1) / 2)
    }

    /// One layer.
    ///
    /// # Errors
    /// If a kernel panicked.
    pub fn call(&mut self) -> Result<()> {
        let causal = Causal {
            heads: self.heads,
            group: self.group,
            d: self.d,
            queries: self.format,
            results: self.format,
            q: &self.q,
            keys: &self.keys,
            values: &self.values,
            tokens: (self.first + self.panels) * PANEL_TOKENS,
            first: self.first,
            panels: self.panels,
            reach: None,
        };
        causal.run(&self.pool, self.simd, &mut || Ok(()), &mut self.scratch, &mut self.out)
    }
}
