//! Queries, keys and values of a prompt block, from the output of the QKV matrix.

use super::Prompt;
use crate::dispatch::{Simd, portable};
use crate::elementwise::{LANES, PANEL_TOKENS};
use crate::lanes::{f16_bits, f16_is_finite, take};
use crate::masses;
use crate::memory::DisjointSlice;
use crate::prefill::{Format, panel_len, put_features, tile_padding};
use crate::weights::QkvOffsets;
use quantspec_core::config::ModelConfig;
use quantspec_model::backend::Block;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Adds biases, normalises, rotates and stores the heads of a block. A row's queries are multiplied by log2(e)/√D.
pub(super) struct QkvHeads<'a> {
    pub(super) simd: Simd,
    pub(super) config: &'a ModelConfig,
    pub(super) offsets: QkvOffsets,
    pub(super) block: &'a Block<'a>,
    /// First panel of the block, and their number.
    pub(super) first: usize,
    pub(super) panels: usize,
    /// Output of the matrix, `[panel][offsets.width][64]`.
    pub(super) y: &'a [f32],
    /// Empty if the model has none.
    pub(super) bias: &'a [f32],
    /// Norms of every query and key head.
    pub(super) norms: Option<&'a (Vec<f32>, Vec<f32>)>,
    /// [`Prompt::cos`], [`Prompt::sin`].
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
    pub(super) angles: Angles,
    /// Format of queries.
    pub(super) queries: Format,
    /// Tokens of a head of `keys` and `values`.
    pub(super) tokens: usize,
    pub(super) q: DisjointSlice<'a, f32>,
    pub(super) keys: DisjointSlice<'a, u16>,
    pub(super) values: DisjointSlice<'a, u16>,
    /// The queries of the prompt's end, if they are kept.
    pub(super) last: masses::Rows<'a>,
    /// Set if a key or a value is NaN or beyond half precision.
    pub(super) broken: AtomicBool,
}

/// The angles of a layer in [`Prompt::cos`].
#[derive(Clone, Copy)]
pub(super) enum Angles {
    /// Those of panel 0 are from this entry on.
    From(usize),
    /// The layer has no position embedding: the last panel of angles.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Query,
    Key,
    Value,
}

/// A work item: a head, and the panels of a block. One item has all panels of a KV head's keys, another all of its values;
/// queries are one item per head and panel.
struct Head {
    kind: Kind,
    /// Number of the head among those of its kind.
    index: usize,
    /// Its first output of the matrix.
    from: usize,
    panels: Range<usize>,
}

impl Head {
    fn of(item: usize, config: &ModelConfig, offsets: QkvOffsets, panels: usize) -> Head {
        let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
        if item < kv_heads {
            Head { kind: Kind::Key, index: item, from: offsets.key + item * d, panels: 0..panels }
        } else if item < 2 * kv_heads {
            let index = item - kv_heads;
            Head { kind: Kind::Value, index, from: offsets.value + index * d, panels: 0..panels }
        } else {
            let (panel, index) = ((item - 2 * kv_heads) / heads, (item - 2 * kv_heads) % heads);
            Head { kind: Kind::Query, index, from: index * d, panels: panel..panel + 1 }
        }
    }
}

impl QkvHeads<'_> {
    /// Number of work items.
    pub(super) fn items(&self) -> usize {
        2 * self.config.kv_heads + self.config.heads * self.panels
    }

    /// Computes a work item. `head`: room for one of sixteen tokens, `[D]`.
    ///
    /// # Safety
    /// No other thread runs the same item in this dispatch.
    pub(super) unsafe fn run(&self, item: usize, head: &mut [[f32; LANES]]) {
        let Head { kind, index, from, panels } = Head::of(item, self.config, self.offsets, self.panels);
        for panel in panels {
            for lane in (0..PANEL_TOKENS).step_by(LANES) {
                self.load(panel, from, lane, head);
                match kind {
                    Kind::Query => {
                        self.norm_and_rotate(panel, lane, self.norms.map(|norms| &norms.0[..]), head);
                        // SAFETY: a query head of a panel is one item, by the caller's promise of one thread.
                        unsafe { self.put_query(panel, index, lane, head) };
                    }
                    Kind::Key => {
                        self.norm_and_rotate(panel, lane, self.norms.map(|norms| &norms.1[..]), head);
                        // SAFETY: the keys of a head are one item, by the caller's promise of one thread.
                        unsafe { self.put_tokens(self.keys, panel, index, lane, head) };
                    }
                    // SAFETY: as of the keys.
                    Kind::Value => unsafe { self.put_tokens(self.values, panel, index, lane, head) },
                }
            }
        }
    }

    /// Position of the first of sixteen tokens.
    fn position(&self, panel: usize, lane: usize) -> usize {
        (self.first + panel) * PANEL_TOKENS + lane
    }

    /// The lanes among sixteen from `lane` on that belong to the block.
    fn lanes(&self, panel: usize, lane: usize) -> impl Iterator<Item = usize> {
        let lanes = Prompt::lanes(self.block, self.first + panel);
        (0..LANES).filter(move |l| lanes.contains(&(lane + l)))
    }

    /// Reads a head whose first output is `from`, and adds the bias.
    #[inline]
    fn load(&self, panel: usize, from: usize, lane: usize, head: &mut [[f32; LANES]]) {
        let y = &self.y[(panel * self.offsets.width + from) * PANEL_TOKENS..][..head.len() * PANEL_TOKENS];
        for (c, head) in head.iter_mut().enumerate() {
            *head = take(y, c * PANEL_TOKENS + lane);
            if let Some(bias) = self.bias.get(from + c) {
                head.iter_mut().for_each(|x| *x += bias);
            }
        }
    }

    /// Normalises a head, if there is a norm, and rotates it.
    #[inline]
    fn norm_and_rotate(&self, panel: usize, lane: usize, weight: Option<&[f32]>, head: &mut [[f32; LANES]]) {
        let simd = self.simd;
        if let Some(weight) = weight {
            let (head, eps) = (&mut *head, self.config.rms_eps);
            portable!(simd, norm_head(head: &mut [[f32; LANES]], weight: &[f32], eps: f32));
        }
        let of_panel = head.len() / 2 * PANEL_TOKENS;
        let at = match self.angles {
            Angles::From(start) => start + (self.first + panel) * of_panel,
            Angles::None => self.cos.len() - of_panel,
        };
        let (cos, sin) = (&self.cos[at + lane..], &self.sin[at + lane..]);
        portable!(simd, rotate(head: &mut [[f32; LANES]], cos: &[f32], sin: &[f32]));
    }

    /// Scales and stores a query head.
    ///
    /// # Safety
    /// No other thread stores this head of this panel.
    #[inline]
    unsafe fn put_query(&self, panel: usize, index: usize, lane: usize, head: &mut [[f32; LANES]]) {
        let (d, position) = (head.len(), self.position(panel, lane));
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let factors: [f32; LANES] = std::array::from_fn(|l| scale * self.config.query_factor(position + l));
        head.iter_mut().for_each(|x| x.iter_mut().zip(&factors).for_each(|(x, f)| *x *= f));
        for l in self.lanes(panel, lane) {
            // SAFETY: a row's head is in one panel; that of this function.
            let to = unsafe { self.last.row(position + l, index) };
            to.iter_mut().zip(&*head).for_each(|(to, x)| *to = x[l]);
        }
        // SAFETY: heads of panels do not overlap; that of this function.
        let q = unsafe { self.q.slice((panel * self.config.heads + index) * panel_len(d), panel_len(d)) };
        put_features(self.simd, self.queries, q, 0, lane, head);
        if self.queries == Format::Pairs && lane == 0 {
            q[tile_padding(d)].fill(0.0);
        }
    }

    /// Stores sixteen tokens of a KV head in `halves`, the keys or the values.
    ///
    /// # Safety
    /// No other thread stores tokens of this head in `halves`.
    #[inline]
    unsafe fn put_tokens(
        &self,
        halves: DisjointSlice<u16>,
        panel: usize,
        index: usize,
        lane: usize,
        head: &[[f32; LANES]],
    ) {
        let d = head.len();
        for l in self.lanes(panel, lane) {
            let token = index * self.tokens + self.position(panel, lane) + l;
            // SAFETY: tokens do not overlap; that of this function.
            let out = unsafe { halves.slice(token * d, d) };
            if !put_halves(out, head, l) {
                self.broken.store(true, Relaxed);
            }
        }
    }
}

/// Stores one lane of a head in half precision. Returns false if a number is NaN or too large; it is stored as 0, because a
/// later prompt multiplies entries after its end by zero.
#[inline(always)]
fn put_halves(out: &mut [u16], head: &[[f32; LANES]], lane: usize) -> bool {
    let mut finite = true;
    for (out, x) in out.iter_mut().zip(head) {
        let bits = f16_bits(x[lane]);
        let number = f16_is_finite(bits);
        *out = if number { bits } else { 0 };
        finite &= number;
    }
    finite
}

/// RMSNorm of one head of sixteen tokens.
#[inline(always)]
fn norm_head<const FMA: bool>(head: &mut [[f32; LANES]], weight: &[f32], eps: f32) {
    let mut squares = [0f32; LANES];
    for x in head.iter() {
        for l in 0..LANES {
            squares[l] += x[l] * x[l];
        }
    }
    let count = head.len() as f32;
    let scale = squares.map(|sum| 1.0 / (sum / count + eps).sqrt());
    for (x, w) in head.iter_mut().zip(weight) {
        for l in 0..LANES {
            x[l] = x[l] * scale[l] * w;
        }
    }
}

/// RoPE of one head of sixteen tokens; `cos`, `sin`: `[D/2][64]`, from the first token's lane on.
#[inline(always)]
fn rotate<const FMA: bool>(head: &mut [[f32; LANES]], cos: &[f32], sin: &[f32]) {
    let half = head.len() / 2;
    let (a, b) = head.split_at_mut(half);
    for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
        let (c, s): ([f32; LANES], [f32; LANES]) = (take(cos, i * PANEL_TOKENS), take(sin, i * PANEL_TOKENS));
        for l in 0..LANES {
            (a[l], b[l]) = (a[l] * c[l] - b[l] * s[l], b[l] * c[l] + a[l] * s[l]);
        }
    }
}
