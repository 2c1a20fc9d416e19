//! Importance of the inputs of a model's matrices (`core::weights::importance`), from the checkpoint alone.
//!
//! A quantised weight's error is multiplied by its input, and in some models a few inputs are much larger than the others. So
//! rows of made-up texts pass through the layers, and the mean squares of each matrix's inputs are taken. Short texts
//! suffice, because first tokens have the largest inputs.
//!
//! Codes must not depend on the machine. All operations are f32 in a fixed order, without exponentials: a head reads the mean
//! of the values up to its token instead of attending, and activations use a rational tanh. Squares of such rows serve as well
//! as those of texts that a model attends to.

use crate::checkpoint::{Checkpoint, LayerPart, Part};
use crate::draft_cache::source;
use quantspec_core::config::Activation;
use quantspec_core::weights::importance;
use quantspec_core::{Error, Result};
use std::ops::Range;
use std::sync::Mutex;

/// Made-up texts, and tokens of each. Ids are evenly spaced in the first quarter of the vocabulary, where frequent tokens are.
const TEXTS: usize = 4;
const TOKENS: usize = 16;
/// Rows of all texts.
pub const ROWS: usize = TEXTS * TOKENS;

/// One channel of all rows, `[token][text]`.
pub type Channel = [f32; ROWS];

/// Rows whose sums are in registers together, and rows of a matrix that are read at once.
const LANES: usize = 16;
const READ_ROWS: usize = 32;

const _: () = assert!(ROWS.is_multiple_of(LANES) && READ_ROWS.is_multiple_of(2));

/// Multiplies a matrix of the current layer by all rows: `[inputs]` to `[outputs]`. A sum adds its terms in the order of the
/// inputs, each term rounded to f32 before it is added. [`product`] is such a function.
pub type Product<'a> = &'a dyn Fn(Part, &[Channel]) -> Result<Vec<Channel>>;

/// Runs work on ranges that cover 0..count, in any order, on threads of the caller.
pub type Parallel<'a> = &'a dyn Fn(usize, &(dyn Fn(Range<usize>) -> Result<()> + Sync)) -> Result<()>;

/// Importance of the inputs of a layer's matrices; by default there is none.
#[derive(Default)]
pub struct LayerImportance {
    /// Of the query, key and value projections.
    qkv: Vec<f32>,
    /// Of the output projection.
    output: Vec<f32>,
    /// Of the gate and up projections.
    gate_up: Vec<f32>,
    /// Of the down projection.
    down: Vec<f32>,
}

impl LayerImportance {
    /// That of the inputs of one matrix, `[k]`; empty for other parts, and if there is none.
    pub fn of(&self, part: LayerPart) -> &[f32] {
        match part {
            LayerPart::Q | LayerPart::K | LayerPart::V => &self.qkv,
            LayerPart::Output => &self.output,
            LayerPart::Gate | LayerPart::Up => &self.gate_up,
            LayerPart::Down => &self.down,
            _ => &[],
        }
    }
}

/// The rows of the texts on their way through the layers.
pub struct MadeUpRows<'a> {
    checkpoint: &'a Checkpoint,
    /// The residual stream, `[hidden]`.
    stream: Vec<Channel>,
    layer: usize,
}

impl<'a> MadeUpRows<'a> {
    /// The embeddings.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_stored`].
    pub fn new(checkpoint: &'a Checkpoint) -> Result<MadeUpRows<'a>> {
        let config = checkpoint.config();
        let mut stream = vec![[0.0; ROWS]; config.hidden];
        let mut row = vec![0.0; config.hidden];
        for lane in 0..ROWS {
            let id = (2 * lane + 1) * (config.vocab / 4) / (2 * ROWS);
            checkpoint.read_stored(Part::Embedding, id..id + 1, &mut row)?;
            stream.iter_mut().zip(&row).for_each(|(channel, x)| channel[lane] = x * config.scales.embedding);
        }
        Ok(MadeUpRows { checkpoint, stream, layer: 0 })
    }

    /// Passes the next layer.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_f32`] and of `product`.
    pub fn next_layer(&mut self, product: Product) -> Result<LayerImportance> {
        use LayerPart::*;
        let config = self.checkpoint.config();
        let normed = self.normed(self.stream.clone(), AttentionNorm)?;
        let mut values = self.biased(product, V, VBias, &normed)?;
        values.iter_mut().for_each(means_so_far);
        let heads = (0..config.heads).map(|head| head / config.group() * config.head_dim);
        let read: Vec<Channel> = heads.flat_map(|first| values[first..first + config.head_dim].to_vec()).collect();
        let qkv = importance_of(&normed);
        let branch = self.biased(product, Output, OutputBias, &read)?;
        self.add(branch, AttentionOutputNorm)?;
        let normed = self.normed(self.stream.clone(), MlpNorm)?;
        let mut inner = self.biased(product, Gate, GateBias, &normed)?;
        let up = self.biased(product, Up, UpBias, &normed)?;
        for (gate, up) in inner.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = activated(config.activation, *gate) * up;
        }
        let branch = self.biased(product, Down, DownBias, &inner)?;
        self.add(branch, MlpOutputNorm)?;
        self.layer += 1;
        let (output, gate_up, down) = (importance_of(&read), importance_of(&normed), importance_of(&inner));
        Ok(LayerImportance { qkv, output, gate_up, down })
    }

    /// The vector of the current layer, if the model has it.
    fn vector(&self, part: LayerPart) -> Result<Option<Vec<f32>>> {
        if !part.exists(self.checkpoint.config()) {
            return Ok(None);
        }
        let part = Part::Layer(self.layer, part);
        let mut out = vec![0.0; self.checkpoint.shape(part).1];
        self.checkpoint.read_f32(part, 0..1, &mut out)?;
        Ok(Some(out))
    }

    /// RMSNorm; the same channels if the model has no such norm.
    fn normed(&self, mut channels: Vec<Channel>, part: LayerPart) -> Result<Vec<Channel>> {
        let Some(weights) = self.vector(part)? else { return Ok(channels) };
        let mut squares = [0f32; ROWS];
        for channel in &channels {
            squares.iter_mut().zip(channel).for_each(|(sum, x)| *sum += x * x);
        }
        let (count, eps) = (channels.len() as f32, self.checkpoint.config().rms_eps);
        let factors = squares.map(|sum| 1.0 / (sum / count + eps).sqrt());
        for (channel, weight) in channels.iter_mut().zip(weights) {
            channel.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor * weight);
        }
        Ok(channels)
    }

    fn add(&mut self, branch: Vec<Channel>, norm: LayerPart) -> Result<()> {
        let branch = self.normed(branch, norm)?;
        self.stream.iter_mut().flatten().zip(branch.iter().flatten()).for_each(|(x, branch)| *x += branch);
        Ok(())
    }

    /// A matrix of the current layer times the rows, plus its bias.
    fn biased(&self, product: Product, part: LayerPart, bias: LayerPart, x: &[Channel]) -> Result<Vec<Channel>> {
        let mut out = product(Part::Layer(self.layer, part), x)?;
        for (channel, bias) in out.iter_mut().zip(self.vector(bias)?.into_iter().flatten()) {
            channel.iter_mut().for_each(|x| *x += bias);
        }
        Ok(out)
    }
}

/// Hash of everything that importance depends on, except the layers' matrices.
///
/// # Errors
/// Those of [`Checkpoint::read_f32`] and [`Checkpoint::read_stored`].
pub fn fingerprint(checkpoint: &Checkpoint) -> Result<u128> {
    let config = checkpoint.config();
    let mut bytes = format!("{config:?}").into_bytes();
    let mut add = |values: &[f32]| values.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
    add(MadeUpRows::new(checkpoint)?.stream.as_flattened());
    for part in Part::all(config).into_iter().filter(|part| part.is_vector()) {
        let mut values = vec![0.0; checkpoint.shape(part).1];
        checkpoint.read_f32(part, 0..1, &mut values)?;
        add(&values);
    }
    Ok(source(0, &bytes))
}

/// A [`Product`] on threads of the caller, which reads the matrix.
///
/// # Errors
/// Those of [`Checkpoint::read_stored`] and of the threads.
pub fn product(checkpoint: &Checkpoint, parallel: Parallel, part: Part, x: &[Channel]) -> Result<Vec<Channel>> {
    let (outputs, width) = checkpoint.shape(part);
    let out = Mutex::new(vec![[0.0; ROWS]; outputs]);
    parallel(outputs, &|rows| {
        let mut w = vec![0.0; READ_ROWS.min(rows.len()) * width];
        for first in rows.clone().step_by(READ_ROWS) {
            let rows = first..rows.end.min(first + READ_ROWS);
            let w = &mut w[..rows.len() * width];
            checkpoint.read_stored(part, rows.clone(), w)?;
            let mut found = vec![[0.0; ROWS]; rows.len()];
            found.chunks_mut(2).zip(w.chunks(2 * width)).for_each(|(out, w)| multiply(w, x, out));
            let mut out = out.lock().map_err(|_| Error::internal("a thread failed"))?;
            out[rows].copy_from_slice(&found);
        }
        Ok(())
    })?;
    out.into_inner().map_err(|_| Error::internal("a thread failed"))
}

/// One or two rows of a matrix times all rows: sums with the input upwards.
fn multiply(w: &[f32], x: &[Channel], out: &mut [Channel]) {
    let (first, second) = w.split_at(x.len());
    // A single row counts twice.
    let second = if second.is_empty() { first } else { second };
    for part in 0..ROWS / LANES {
        let mut sums = [[0f32; LANES]; 2];
        for ((x, &a), &b) in x.iter().zip(first).zip(second) {
            for (l, x) in x.as_chunks::<LANES>().0[part].iter().enumerate() {
                sums[0][l] += a * x;
                sums[1][l] += b * x;
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sums)| out.as_chunks_mut::<LANES>().0[part] = sums);
    }
}

/// Each token's mean of its text up to it.
fn means_so_far(channel: &mut Channel) {
    let mut sums = [0f32; TEXTS];
    for (token, values) in channel.as_chunks_mut::<TEXTS>().0.iter_mut().enumerate() {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += *value;
            *value = *sum / (token + 1) as f32;
        }
    }
}

fn importance_of(inputs: &[Channel]) -> Vec<f32> {
    let squares: Vec<f32> = inputs.iter().map(|channel| channel.iter().map(|x| x * x).sum()).collect();
    importance(&squares)
}

/// The activation, within 0.02 of its greatest slope.
fn activated(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => 0.5 * x * (1.0 + tanh(0.5 * x)),
        Activation::Gelu => 0.5 * x * (1.0 + tanh(0.797_884_6 * (x + 0.044_715 * x * x * x))),
    }
}

/// The hyperbolic tangent, within 0.024.
fn tanh(x: f32) -> f32 {
    let x = x.clamp(-3.0, 3.0);
    x * (27.0 + x * x) / (27.0 + 9.0 * x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_near_the_exact_ones() {
        for x in (-80..=80).map(|i| i as f32 / 8.0) {
            let silu = x / (1.0 + (-x).exp());
            let gelu = 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh());
            for (activation, exact) in [(Activation::Silu, silu), (Activation::Gelu, gelu)] {
                let found = activated(activation, x);
                assert!((found - exact).abs() <= 0.02 * x.abs(), "{activation:?} of {x}: {found}, {exact}");
            }
        }
    }

    #[test]
    fn sums_and_means_are_those_of_plain_loops() {
        let x: Vec<Channel> =
            (0..7).map(|k| std::array::from_fn(|lane| ((k * 37 + lane * 11) % 23) as f32 - 11.0)).collect();
        let w: Vec<f32> = (0..3 * 7).map(|i| (i % 5) as f32 - 2.0).collect();
        let mut out = vec![[f32::NAN; ROWS]; 3];
        out.chunks_mut(2).zip(w.chunks(14)).for_each(|(out, w)| multiply(w, &x, out));
        for (row, out) in w.chunks(7).zip(&out) {
            for (lane, found) in out.iter().enumerate() {
                assert_eq!(*found, row.iter().zip(&x).map(|(w, x)| w * x[lane]).sum::<f32>());
            }
        }
        let mut channel: Channel = std::array::from_fn(|lane| lane as f32);
        means_so_far(&mut channel);
        // Text t has values t, t + TEXTS, …
        for (lane, found) in channel.iter().enumerate() {
            let (token, text) = (lane / TEXTS, lane % TEXTS);
            assert_eq!(*found, text as f32 + (token * TEXTS) as f32 / 2.0);
        }
    }
}
