//! Choosing tokens: counter-based noise, warpers, and the choice itself.
//!
//! Noise is a pure function of (seed, sequence, position, purpose, index), so a token does not depend on what was drafted,
//! batched or rolled back before it (design: the law of exactness). Sampling is the Gumbel race: the token with the largest
//! `logit/T + gumbel` wins, which draws exactly from `softmax(logit/T)`. Draft and target that share the noise therefore
//! agree whenever their distributions nearly do.
//!
//! Warpers follow Hugging Face's order: temperature, top-k, top-p, min-p. Logits are taken relative to their maximum before
//! the division, so that no temperature overflows.

use crate::error::{Error, Result};

/// How drafted tokens are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accept {
    /// Equality with the target's argmax; exactly when the temperature is 0.
    Greedy,
    /// Draft and target sample with the same noise; equality is accepted.
    Replay,
    /// Leviathan/Chen: accept with probability min(1, p/q), correct from (p − q)+.
    Rejection,
}

/// How tokens are chosen. Built by [`Sampler::new`], which checks the ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the k largest logits and those equal to the k-th; 0 is off.
    pub top_k: usize,
    /// Keeps the fewest most probable tokens that reach this mass; 1 is off.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable one; 0 is off.
    pub min_p: f32,
    /// Key of the noise.
    pub seed: u64,
    /// Tells sequences of one seed apart. The noise uses the low 62 bits.
    pub sequence: u64,
    /// How drafted tokens are accepted.
    pub accept: Accept,
}

impl Sampler {
    /// A checked sampler.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Usage`] where a value is outside its range, or where `accept` is [`Accept::Greedy`] and the
    /// temperature is not 0, or the reverse.
    pub fn new(
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        seed: u64,
        sequence: u64,
        accept: Accept,
    ) -> Result<Sampler> {
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(Error::usage(
                format!("temperature is {temperature}"),
                "give a number from 0 (greedy) upwards, usually below 2",
            ));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::usage(format!("top-p is {top_p}"), "give a number above 0 and up to 1 (off)"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(Error::usage(format!("min-p is {min_p}"), "give a number from 0 (off) to 1"));
        }
        if (temperature == 0.0) != (accept == Accept::Greedy) {
            return Err(Error::usage(
                format!("acceptance rule {accept:?} with temperature {temperature}"),
                "use the greedy rule with temperature 0, replay or rejection with any other",
            ));
        }
        Ok(Sampler { temperature, top_k, top_p, min_p, seed, sequence, accept })
    }

    /// Temperature 0.
    pub fn greedy() -> Sampler {
        Sampler { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, sequence: 0, accept: Accept::Greedy }
    }

    /// The noise a draft chooses with: the target's own for replay, its own for rejection.
    pub fn draft_stream(&self) -> Stream {
        match self.accept {
            Accept::Greedy | Accept::Replay => Stream::Sample,
            Accept::Rejection => Stream::Draft,
        }
    }
}

/// Purposes of the noise. Two purposes never share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Stream {
    /// A token sampled from the target, or from the draft under [`Accept::Replay`].
    Sample = 0,
    /// A token sampled from the draft under [`Accept::Rejection`].
    Draft = 1,
    /// The acceptance test of a drafted token.
    Accept = 2,
    /// The token that replaces a rejected one.
    Correct = 3,
}

/// Philox4x32-10 (Salmon et al., SC 2011): ten rounds of two 32-bit multiplications; a bijection of the counter per key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    for _ in 0..10 {
        let (left, right) = (0xD251_1F53_u64 * u64::from(a), 0xCD9E_8D57_u64 * u64::from(c));
        (a, b, c, d) = ((right >> 32) as u32 ^ b ^ k, right as u32, (left >> 32) as u32 ^ d ^ l, left as u32);
        (k, l) = (k.wrapping_add(0x9E37_79B9), l.wrapping_add(0xBB67_AE85));
    }
    [a, b, c, d]
}

/// Noise of four consecutive indices, `4·block ..= 4·block + 3`, of one place.
fn block(seed: u64, sequence: u64, position: usize, stream: Stream, block: u64) -> [u32; 4] {
    let purpose = ((sequence >> 32) as u32) << 2 | stream as u32;
    philox([position as u32, sequence as u32, purpose, block as u32], [seed as u32, (seed >> 32) as u32])
}

/// The middle of one of 2²³ equal cells of (0, 1): exact in f32, never 0 or 1.
fn unit(word: u32) -> f32 {
    (2 * (word >> 9) + 1) as f32 * (1.0 / 16_777_216.0)
}

/// Uniform noise in (0, 1), at least 2⁻²⁴ from both ends.
///
/// Philox counter: `[position, sequence low, sequence high << 2 | stream, index / 4]`, key: seed low and high; `index mod 4`
/// picks the word; its upper 23 bits pick a cell. No state, the same on every platform.
pub fn uniform(seed: u64, sequence: u64, position: usize, stream: Stream, index: u64) -> f32 {
    unit(block(seed, sequence, position, stream, index / 4)[(index % 4) as usize])
}

/// Standard Gumbel noise `−ln(−ln u)`, within (−2.82, 16.64).
pub fn gumbel(seed: u64, sequence: u64, position: usize, stream: Stream, index: u64) -> f32 {
    gumbel_of(uniform(seed, sequence, position, stream, index))
}

/// In f64, so that the rounding of a platform's logarithm almost never reaches the f32 result.
fn gumbel_of(u: f32) -> f32 {
    -(-f64::from(u).ln()).ln() as f32
}

/// Above every [`gumbel`]: −ln(−ln(1 − 2⁻²⁴)) = 16.6355.
const GUMBEL_MAX: f32 = 16.64;

/// The largest value, or −∞ for none; NaN is passed over. Sixteen lanes, so that it runs at the speed of a vector maximum.
fn maximum(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &value| if value > most { value } else { most })
}

/// Token of the largest logit, the lowest id among equals. Not-a-number is passed over; refuse it first with
/// [`check_finite`].
pub fn argmax(logits: &[f32]) -> u32 {
    let most = maximum(logits);
    logits.iter().position(|&logit| logit == most).unwrap_or(0) as u32
}

/// Refuses logits no token can be chosen from.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] where a logit is NaN or +∞, or none is finite. −∞ masks a token and is allowed.
pub fn check_finite(logits: &[f32]) -> Result<()> {
    let bad = logits.iter().filter(|logit| logit.is_nan() || **logit == f32::INFINITY).count();
    match bad {
        0 if maximum(logits) > f32::NEG_INFINITY => Ok(()),
        0 => Err(Error::not_finite(format!("all {} logits are −∞", logits.len()))),
        _ => Err(Error::not_finite(format!("{bad} of {} logits are NaN or infinite", logits.len()))),
    }
}

/// `(logit − maximum) / temperature`: at most 0, and 0 for the most probable token whatever the temperature.
fn scaled(logit: f32, most: f32, temperature: f32) -> f32 {
    if logit == most { 0.0 } else { (logit - most) / temperature }
}

/// The k-th largest value, without sorting: at most 2k candidates are held, halved by selection when full.
fn kth_largest(values: &[f32], k: usize) -> f32 {
    if k >= values.len() {
        return f32::NEG_INFINITY;
    }
    let mut best: Vec<f32> = Vec::with_capacity(2 * k);
    let mut bar = f32::NEG_INFINITY;
    for &value in values {
        if value > bar {
            best.push(value);
            if best.len() == 2 * k {
                bar = keep_largest(&mut best, k);
            }
        }
    }
    if best.len() < k { bar } else { keep_largest(&mut best, k) }
}

/// Shortens `values` to its k largest and returns the least of them.
fn keep_largest(values: &mut Vec<f32>, k: usize) -> f32 {
    let (_, least, _) = values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let least = *least;
    values.truncate(k);
    least
}

/// A token that may be chosen, with its scaled logit.
type Candidate = (u32, f32);

/// Descending by scaled logit, ascending by id among equals.
fn by_probability(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Moves the fewest most probable candidates that hold `top_p` of the mass to the front and cuts the rest. Sorts growing
/// heads of the list, since a few hundred tokens usually hold the mass.
fn nucleus(candidates: &mut Vec<Candidate>, top_p: f32) {
    let total: f64 = candidates.iter().map(|c| f64::from(c.1.exp())).sum();
    let goal = f64::from(top_p) * total;
    let (mut done, mut mass, mut head) = (0, 0.0, 256);
    while done < candidates.len() {
        let rest = &mut candidates[done..];
        if head < rest.len() {
            rest.select_nth_unstable_by(head, by_probability);
        }
        let end = head.min(rest.len());
        rest[..end].sort_unstable_by(by_probability);
        for (at, candidate) in rest[..end].iter().enumerate() {
            mass += f64::from(candidate.1.exp());
            if mass >= goal {
                candidates.truncate(done + at + 1);
                return;
            }
        }
        done += end;
        head *= 4;
    }
}

/// Tokens that survive the warpers with their scaled logits, ascending by id.
fn kept(logits: &[f32], sampler: &Sampler) -> Vec<Candidate> {
    let most = maximum(logits);
    let bar = if sampler.top_k > 0 { kth_largest(logits, sampler.top_k) } else { f32::NEG_INFINITY };
    let mut candidates: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| **logit >= bar && **logit > f32::NEG_INFINITY)
        .map(|(id, &logit)| (id as u32, scaled(logit, most, sampler.temperature)))
        .collect();
    if sampler.top_p < 1.0 {
        nucleus(&mut candidates, sampler.top_p);
        candidates.sort_unstable_by_key(|c| c.0);
    }
    if sampler.min_p > 0.0 {
        candidates.retain(|c| c.1.exp() >= sampler.min_p);
    }
    candidates
}

/// Probabilities `[vocab]` after temperature, top-k, top-p and min-p; they sum to 1 within rounding. Temperature 0 puts all
/// mass on the argmax.
pub fn warp(logits: &[f32], sampler: &Sampler) -> Vec<f32> {
    let mut probabilities = vec![0.0; logits.len()];
    if sampler.temperature == 0.0 {
        if let Some(p) = probabilities.get_mut(argmax(logits) as usize) {
            *p = 1.0;
        }
        return probabilities;
    }
    let candidates = kept(logits, sampler);
    let total: f64 = candidates.iter().map(|c| f64::from(c.1.exp())).sum();
    for (id, z) in candidates {
        probabilities[id as usize] = (f64::from(z.exp()) / total) as f32;
    }
    probabilities
}

/// The token at `position`, from the logits of the row before it: the argmax at temperature 0, else the winner of the Gumbel
/// race among the tokens the warpers keep.
pub fn choose(logits: &[f32], sampler: &Sampler, position: usize, stream: Stream) -> u32 {
    let most_likely = argmax(logits);
    if sampler.temperature == 0.0 {
        return most_likely;
    }
    let noise = |id: u32| gumbel(sampler.seed, sampler.sequence, position, stream, u64::from(id));
    // The most probable token first: its score lets nearly every other token be passed over without its noise.
    let mut winner = (most_likely, noise(most_likely));
    let mut race = |id: u32, z: f32| {
        if z + GUMBEL_MAX >= winner.1 {
            let score = z + noise(id);
            if score > winner.1 || (score == winner.1 && id < winner.0) {
                winner = (id, score);
            }
        }
    };
    if sampler.top_k == 0 && sampler.top_p >= 1.0 && sampler.min_p == 0.0 {
        let most = maximum(logits);
        for (id, &logit) in logits.iter().enumerate() {
            race(id as u32, scaled(logit, most, sampler.temperature));
        }
    } else {
        for (id, z) in kept(logits, sampler) {
            race(id, z);
        }
    }
    winner.0
}

/// A token drawn in proportion to `weights` (not negative, any sum), by the same race: the largest weight over −ln u wins.
/// With no positive weight it is token 0.
pub fn draw(weights: &[f32], sampler: &Sampler, position: usize, stream: Stream) -> u32 {
    /// Below every −ln u.
    const EXPONENTIAL_MIN: f64 = 5.9e-8;
    let mut winner = (0, 0.0_f64);
    let mut race = |id: usize| {
        let weight = f64::from(weights[id]);
        if weight > 0.0 && weight / EXPONENTIAL_MIN >= winner.1 {
            let u = uniform(sampler.seed, sampler.sequence, position, stream, id as u64);
            let score = weight / -f64::from(u).ln();
            if score > winner.1 || (score == winner.1 && id < winner.0) {
                winner = (id, score);
            }
        }
    };
    if !weights.is_empty() {
        race(argmax(weights) as usize);
    }
    (0..weights.len()).for_each(race);
    winner.0 as u32
}
