//! Choosing tokens: warpers, and the choice itself.
//!
//! Sampling is the Gumbel race: the token with the largest `logit/T + gumbel` wins ([`crate::noise`]), which is an exact sample
//! of `softmax(logit/T)`. Draft and target with the same noise agree if their distributions are nearly equal.
//!
//! Warpers follow Hugging Face's order: temperature, top-k, top-p, min-p, after the penalties of [`crate::penalty`]. The
//! maximum is subtracted from the logits before the division, so that no temperature overflows.

use crate::error::{Error, Result};
use crate::noise::{GUMBEL_MAX, Noise, Stream, TILE, gumbel_of, unit};
use crate::penalty::Penalties;

/// How drafted tokens are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accept {
    /// Accept a token that equals the target's argmax. The rule for temperature 0, and only for it.
    Greedy,
    /// Draft and target sample with the same noise; accept a token if both agree.
    Replay,
    /// Block verification (`verify.rs`). The distribution equals plain decoding's; a seed's tokens depend on γ.
    Rejection,
}

/// Sampling settings; [`Sampler::checked`] checks their ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the k largest logits and those equal to the k-th; 0 is off.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens with this total probability; 1 is off.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable one; 0 is off.
    pub min_p: f32,
    /// Key of the noise.
    pub seed: u64,
    /// Distinguishes sequences of one seed. The noise uses the low 62 bits.
    pub sequence: u64,
    /// How drafted tokens are accepted.
    pub accept: Accept,
    /// Penalties, applied to logits before the warpers.
    pub penalties: Penalties,
}

impl Sampler {
    /// Temperature 0, without penalties.
    pub fn greedy() -> Sampler {
        Sampler {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            sequence: 0,
            accept: Accept::Greedy,
            penalties: Penalties::default(),
        }
    }

    /// These settings, if they are valid; [`Penalties::new`] checks the penalties.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Usage`] if a value is outside its range, or if [`Accept::Greedy`] and temperature 0 do not occur
    /// together.
    pub fn checked(self) -> Result<Sampler> {
        let Sampler { temperature, top_p, min_p, accept, .. } = self;
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
        Ok(self)
    }

    /// The noise of one purpose at a position.
    pub fn noise(&self, position: usize, stream: Stream) -> Noise {
        Noise { seed: self.seed, sequence: self.sequence, position, stream }
    }

    /// The noise of the token drafted at an offset of its round: the target's for replay, a separate stream for rejection.
    pub fn draft_stream(&self, offset: usize) -> Stream {
        match self.accept {
            Accept::Greedy | Accept::Replay => Stream::Sample,
            Accept::Rejection => Stream::Draft(offset),
        }
    }
}

/// The largest value, or −∞ for none; NaN is ignored. Sixteen lanes, which compile to vector maxima.
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

/// Token of the largest logit of a row `[vocab]`; the lowest id wins ties. NaN is ignored; call [`check_finite`] first.
pub fn argmax(logits: &[f32]) -> u32 {
    // Only the part that holds the maximum is read twice.
    const PART: usize = 4096;
    let (mut most, mut first) = (f32::NEG_INFINITY, 0);
    for (part, logits) in logits.chunks(PART).enumerate() {
        let own = maximum(logits);
        if own > most {
            (most, first) = (own, PART * part);
        }
    }
    let after = logits.iter().skip(first).position(|&logit| logit == most);
    after.map_or(0, |after| (first + after) as u32)
}

/// Refuses logits `[vocab]` from which no token can be chosen.
///
/// # Errors
/// [`crate::ErrorKind::NotFinite`] if a logit is NaN or +∞, or none is finite. −∞ masks a token and is allowed.
pub fn check_finite(logits: &[f32]) -> Result<()> {
    let bad = logits.iter().map(|logit| u32::from(logit.is_nan() || *logit == f32::INFINITY)).sum::<u32>();
    match bad {
        0 if maximum(logits) > f32::NEG_INFINITY => Ok(()),
        0 => Err(Error::not_finite(format!("all {} logits are −∞", logits.len()))),
        _ => Err(Error::not_finite(format!("{bad} of {} logits are NaN or infinite", logits.len()))),
    }
}

/// Refuses logits `[vocab]` after penalties and masks; the network's own passed [`check_finite`].
///
/// # Errors
/// [`Error::no_token_left`] if all tokens are masked, and those of [`check_finite`].
pub fn check_left(logits: &[f32]) -> Result<()> {
    match check_finite(logits) {
        Err(_) if logits.iter().all(|&logit| logit == f32::NEG_INFINITY) => Err(Error::no_token_left()),
        checked => checked,
    }
}

/// The k-th largest value, without sorting: keeps at most 2k values, halved by selection when full.
fn kth_largest(values: &[f32], k: usize) -> f32 {
    if k >= values.len() {
        return f32::NEG_INFINITY;
    }
    let mut best: Vec<f32> = Vec::with_capacity(2 * k);
    let mut bar = f32::NEG_INFINITY;
    for values in values.chunks(TILE) {
        if maximum(values) <= bar {
            continue;
        }
        for &value in values {
            if value > bar {
                best.push(value);
                if best.len() == 2 * k {
                    bar = keep_largest(&mut best, k);
                }
            }
        }
    }
    if best.len() < k { bar } else { keep_largest(&mut best, k) }
}

/// Truncates `values` to its k largest and returns the smallest of them.
fn keep_largest(values: &mut Vec<f32>, k: usize) -> f32 {
    let (_, least, _) = values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let least = *least;
    values.truncate(k);
    least
}

/// A token with its scaled logit.
type Scaled = (u32, f32);

/// Descending by scaled logit, ascending by id among equals.
fn by_probability(a: &Scaled, b: &Scaled) -> std::cmp::Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0))
}

/// eˣ for x ≤ 0, with a relative error below 3·10⁻⁷; 0 below −86. Without a library's function, so that a loop over it
/// compiles to vectors.
fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r with a whole n: adding this number rounds to n, and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few bits, so that n times it is exact.
    const LN_2: (f32, f32) = (355.0 / 512.0, -2.121_944_4e-4);
    let shifted = x.max(-86.0) * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x.max(-86.0) - n * LN_2.0) - n * LN_2.1;
    // The Taylor polynomial of degree 6, on |r| ≤ ½·ln 2.
    let tail = ((r * (1.0 / 720.0) + 1.0 / 120.0) * r + 1.0 / 24.0) * r + 1.0 / 6.0;
    let sum = ((tail * r + 0.5) * r + 1.0) * r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -86.0 { 0.0 } else { sum * power }
}

/// The sum of weights, in eight lanes, which compile to vectors.
fn mass(weights: &[f32]) -> f64 {
    let mut lanes = [0.0; 8];
    let chunks = weights.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().copied().map(f64::from).sum();
    for chunk in chunks {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// Which tokens of a row survive the warpers.
struct Kept {
    /// Largest logit.
    most: f32,
    temperature: f32,
    /// Least logit that top-k keeps.
    bar: f32,
    /// Last token that top-p and min-p keep, in order of probability.
    last: Scaled,
}

impl Kept {
    fn of(logits: &[f32], sampler: &Sampler) -> Kept {
        let (most, temperature) = (maximum(logits), sampler.temperature);
        let bar = if sampler.top_k > 0 { kth_largest(logits, sampler.top_k) } else { f32::NEG_INFINITY };
        let mut kept = Kept { most, temperature, bar, last: (u32::MAX, f32::MIN) };
        if sampler.top_p < 1.0 {
            kept.last = kept.last_of_nucleus(logits, sampler.top_p).unwrap_or(kept.last);
        }
        if sampler.min_p > 0.0 {
            kept.last = std::cmp::min_by(kept.last, (u32::MAX, sampler.min_p.ln()), by_probability);
        }
        kept
    }

    /// `(logit − maximum) / temperature`, at most 0; −∞ if top-k drops the token.
    fn z(&self, logit: f32) -> f32 {
        if logit >= self.bar { (logit - self.most) / self.temperature } else { f32::NEG_INFINITY }
    }

    /// Top-p and min-p keep the token.
    fn keeps(&self, (id, z): Scaled) -> bool {
        z > self.last.1 || (z == self.last.1 && id <= self.last.0)
    }

    /// The last token of the smallest set of most probable tokens with at least `top_p` of the mass.
    ///
    /// Buckets of an eighth of a nat find the limit in one pass; only the bucket at the limit is sorted.
    fn last_of_nucleus(&self, logits: &[f32], top_p: f32) -> Option<Scaled> {
        const BUCKETS: usize = 256;
        // Adding 2²³ rounds to a whole number, and leaves it in the low bits.
        let bucket = |z: f32| ((-8.0 * z).min(255.0) + 8_388_608.0).to_bits() as usize % BUCKETS;
        // In four parts, so that neighbours in one bucket do not wait for each other.
        let mut parts = [[0.0; BUCKETS]; 4];
        for logits in logits.chunks(TILE).filter(|logits| maximum(logits) >= self.bar) {
            let (mut buckets, mut weights) = ([0; TILE], [0.0; TILE]);
            for ((at, weight), &logit) in buckets.iter_mut().zip(&mut weights).zip(logits) {
                let z = self.z(logit);
                (*at, *weight) = (bucket(z), exp(z));
            }
            for (buckets, weights) in buckets.chunks_exact(4).zip(weights.chunks_exact(4)) {
                for (part, masses) in parts.iter_mut().enumerate() {
                    masses[buckets[part]] += f64::from(weights[part]);
                }
            }
        }
        let masses: [f64; BUCKETS] = std::array::from_fn(|at| parts.iter().map(|masses| masses[at]).sum());
        let goal = f64::from(top_p) * masses.iter().sum::<f64>();
        let (mut mass, mut edge) = (0.0, 0);
        while edge + 1 < BUCKETS && mass + masses[edge] < goal {
            mass += masses[edge];
            edge += 1;
        }
        let mut at_edge: Vec<Scaled> = Vec::new();
        for (tile, logits) in logits.chunks(TILE).enumerate() {
            if bucket(self.z(maximum(logits))) <= edge {
                let tokens = (tile * TILE..).zip(logits).map(|(id, &logit)| (id as u32, self.z(logit)));
                at_edge.extend(tokens.filter(|&(_, z)| z > f32::NEG_INFINITY && bucket(z) == edge));
            }
        }
        at_edge.sort_unstable_by(by_probability);
        let reaches = |(_, z): &&Scaled| {
            mass += f64::from(exp(*z));
            mass >= goal
        };
        // If rounding leaves the sum just below the goal, the whole bucket is kept.
        at_edge.iter().find(reaches).or(at_edge.last()).copied()
    }
}

/// Probabilities `[vocab]` after temperature, top-k, top-p and min-p; they sum to 1 within rounding. At temperature 0 the
/// argmax has probability 1.
pub fn warp(logits: &[f32], sampler: &Sampler) -> Vec<f32> {
    let mut probabilities = vec![0.0; logits.len()];
    if sampler.temperature == 0.0 {
        if let Some(p) = probabilities.get_mut(argmax(logits) as usize) {
            *p = 1.0;
        }
        return probabilities;
    }
    let kept = Kept::of(logits, sampler);
    for (id, (p, &logit)) in probabilities.iter_mut().zip(logits).enumerate() {
        let z = kept.z(logit);
        *p = if kept.keeps((id as u32, z)) { exp(z) } else { 0.0 };
    }
    let scale = 1.0 / mass(&probabilities);
    probabilities.iter_mut().for_each(|p| *p = (f64::from(*p) * scale) as f32);
    probabilities
}

/// The token at `position`, from the logits `[vocab]` of the row before it: the argmax at temperature 0, else the winner of the
/// Gumbel race among the kept tokens.
pub fn choose(logits: &[f32], sampler: &Sampler, position: usize, stream: Stream) -> u32 {
    let most_likely = argmax(logits);
    if sampler.temperature == 0.0 {
        return most_likely;
    }
    race::<false>(logits, most_likely, sampler, sampler.noise(position, stream)).0
}

/// [`choose`], and the token's margin to the second-best one, as a difference of logits with their noise. If the warpers keep
/// one token only, its margin is without noise; it is infinite in a vocabulary of one.
pub fn choose_with_margin(logits: &[f32], sampler: &Sampler, position: usize, stream: Stream) -> (u32, f32) {
    let most_likely = argmax(logits);
    if sampler.temperature > 0.0 {
        let (token, margin) = race::<true>(logits, most_likely, sampler, sampler.noise(position, stream));
        if margin.is_finite() {
            return (token, margin * sampler.temperature);
        }
    }
    let (before, after) = logits.split_at(most_likely as usize);
    let (first, after) = after.split_first().unwrap_or((&0.0, &[]));
    (most_likely, first - maximum(before).max(maximum(after)))
}

/// The winner of the Gumbel race and, with `MARGIN`, its margin to the second.
fn race<const MARGIN: bool>(logits: &[f32], most_likely: u32, sampler: &Sampler, noise: Noise) -> (u32, f32) {
    let kept = Kept::of(logits, sampler);
    // Starts with the most probable token: its score excludes nearly all other tokens without computing their logarithms.
    let first = noise.gumbel(most_likely.into());
    let mut race = Race::<MARGIN> { most_likely, winner: (most_likely, first), second: f32::NEG_INFINITY };
    for (tile, logits) in logits.chunks(TILE).enumerate() {
        let (first, bar) = (tile * TILE, race.bar());
        // A tile whose largest logit cannot win needs no noise.
        let best = kept.z(maximum(logits));
        if best + GUMBEL_MAX < bar || !kept.keeps((first as u32, best)) {
            continue;
        }
        let words = noise.words(tile);
        let (mut scaled, mut may_win) = ([0.0; TILE], [false; TILE]);
        for (at, &logit) in logits.iter().enumerate() {
            scaled[at] = kept.z(logit);
            may_win[at] = may_reach(bar, scaled[at], unit(words[at]));
        }
        for (at, _) in may_win.iter().enumerate().filter(|(_, may_win)| **may_win) {
            let token = ((first + at) as u32, scaled[at]);
            if kept.keeps(token) {
                race.enter(token, unit(words[at]));
            }
        }
    }
    race.result()
}

/// A Gumbel race in progress: the token with the highest score and, with `MARGIN`, the second-highest score.
struct Race<const MARGIN: bool> {
    most_likely: u32,
    winner: (u32, f32),
    second: f32,
}

impl<const MARGIN: bool> Race<MARGIN> {
    /// Lower scores change nothing.
    fn bar(&self) -> f32 {
        if MARGIN { self.second } else { self.winner.1 }
    }

    /// Enters a token with its scaled logit and its noise.
    fn enter(&mut self, (id, z): Scaled, u: f32) {
        if (MARGIN && id == self.most_likely) || !may_reach(self.bar(), z, u) {
            return;
        }
        let score = z + gumbel_of(u);
        if score > self.winner.1 || (score == self.winner.1 && id < self.winner.0) {
            (self.second, self.winner) = (self.winner.1, (id, score));
        } else if score > self.second {
            self.second = score;
        }
    }

    fn result(&self) -> (u32, f32) {
        (self.winner.0, self.winner.1 - self.second)
    }
}

/// False only if z plus the Gumbel noise of u is below the bar. As −ln(−ln u) ≤ −ln(1 − u), one exponential decides, without
/// logarithms.
fn may_reach(bar: f32, z: f32, u: f32) -> bool {
    1.0 - u <= exp_bound(z - bar)
}

/// At least eˣ for x < 0, by at most 7 % above −80, and at least 1 for x ≥ 0. −∞ and NaN give a number below 10⁻³⁰.
fn exp_bound(x: f32) -> f32 {
    // Between two whole numbers 2ᵗ is below its chord. A float whose exponent and mantissa are t in fixed point, with 8 bits
    // after the point, lies on the chord. Adding 2²³ rounds to fixed point; with 1½ more it rounds up.
    let t = (x.max(-87.0) * std::f32::consts::LOG2_E).min(0.5);
    f32::from_bits(((t + 127.0) * 256.0 + 8_388_609.5).to_bits() << 15)
}

/// A token drawn in proportion to `weights` (`[vocab]`, non-negative, any sum), by the same race: the largest weight over −ln u
/// wins. Token 0 if no weight is positive.
pub fn draw(weights: &[f32], noise: Noise) -> u32 {
    let score = |weight: f32, u: f32| f64::from(weight) / -f64::from(u).ln();
    // Starts with the heaviest, so that few others need noise.
    let heaviest = argmax(weights);
    let first = weights.get(heaviest as usize).map_or(0.0, |&weight| score(weight, noise.uniform(heaviest.into())));
    if first <= 0.0 {
        return 0;
    }
    let mut winner = (heaviest, first);
    for (tile, weights) in weights.chunks(TILE).enumerate() {
        // −ln u ≥ 1 − u ≥ 2⁻²⁴, with a margin for rounding.
        if f64::from(maximum(weights)) < winner.1 * 0.999_999 / 16_777_216.0 {
            continue;
        }
        let words = noise.words(tile);
        for (at, (&weight, &word)) in weights.iter().zip(&words).enumerate() {
            let (id, u) = ((tile * TILE + at) as u32, unit(word));
            if weight > 0.0 && f64::from(weight) >= winner.1 * f64::from(1.0 - u) * 0.999_999 {
                let score = score(weight, u);
                if score > winner.1 || (score == winner.1 && id < winner.0) {
                    winner = (id, score);
                }
            }
        }
    }
    winner.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::f32::consts::LN_2;

    fn sampler(temperature: f32, top_k: usize, top_p: f32, min_p: f32, seed: u64) -> Sampler {
        let accept = Accept::Replay;
        Sampler { temperature, top_k, top_p, min_p, seed, accept, ..Sampler::greedy() }.checked().unwrap()
    }

    proptest! {
        #[test]
        fn a_margin_is_that_over_the_second_score(
            logits in prop::collection::vec(prop_oneof![8 => -4.0f32..4.0, 1 => Just(f32::NEG_INFINITY)], 1..40), seed: u64,
            t in 0.1f32..2.0, k in 0usize..9,
        ) {
            prop_assume!(check_finite(&logits).is_ok());
            let sampler = sampler(t, k, 1.0, 0.0, seed);
            let (token, margin) = choose_with_margin(&logits, &sampler, 5, Stream::Sample);
            prop_assert_eq!(token, choose(&logits, &sampler, 5, Stream::Sample));
            let kept = Kept::of(&logits, &sampler);
            let tokens = (0..).zip(&logits).map(|(id, &logit)| (id, kept.z(logit)));
            let score = |(id, z): Scaled| z + sampler.noise(5, Stream::Sample).gumbel(id.into());
            let mut scores: Vec<f32> = tokens.filter(|&token| kept.keeps(token)).map(score).collect();
            scores.sort_unstable_by(|a, b| b.total_cmp(a));
            let mut sorted = logits.clone();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            let plain = sorted.get(1).map_or(f32::INFINITY, |second| sorted[0] - second);
            let want = scores.get(1).map_or(plain, |second| (scores[0] - second) * t);
            prop_assert!(margin == want || (margin - want).abs() < 1e-4, "{} {}", margin, want);

            let (token, margin) = choose_with_margin(&logits, &Sampler::greedy(), 5, Stream::Sample);
            prop_assert_eq!(token, argmax(&logits));
            prop_assert_eq!(margin, plain);
        }
    }

    #[test]
    fn exponentials_are_close_and_their_bounds_are_above() {
        for i in 0..=860_000 {
            let x = i as f32 * -1e-4;
            let (got, want, bound) = (f64::from(exp(x)), f64::from(x).exp(), f64::from(exp_bound(x)));
            assert!((got / want - 1.0).abs() < 3e-7, "{x}: {got} {want}");
            assert!(x < -80.0 || (1.0..1.07).contains(&(bound / want)), "{x}: {bound} {want}");
        }
        assert_eq!((exp(0.0), exp(-86.5), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!([0.0, 1e-30, 0.4, 3.0, f32::INFINITY].into_iter().all(|x| exp_bound(x) >= 1.0));
        assert!([-100.0, f32::NEG_INFINITY, f32::NAN].into_iter().all(|x| exp_bound(x) < 1e-30));
    }

    #[test]
    fn a_sampler_checks_its_ranges() {
        let new = |temperature, top_p, min_p, accept| {
            Sampler { temperature, top_p, min_p, accept, ..Sampler::greedy() }.checked()
        };
        assert_eq!(new(0.0, 1.0, 0.0, Accept::Greedy), Ok(Sampler::greedy()));
        for accept in [Accept::Replay, Accept::Rejection] {
            assert!(new(0.7, 0.9, 0.1, accept).is_ok());
            assert_eq!(new(0.0, 1.0, 0.0, accept).unwrap_err().kind, crate::ErrorKind::Usage);
        }
        assert!(new(0.7, 1.0, 0.0, Accept::Greedy).is_err());
        for bad in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(new(bad, 1.0, 0.0, Accept::Replay).is_err());
        }
        // Under replay the draft shares the target's noise; under rejection it must not be the noise of the target's draw.
        let stream = |accept| new(1.0, 1.0, 0.0, accept).unwrap().draft_stream(3);
        assert_eq!((stream(Accept::Replay), stream(Accept::Rejection)), (Stream::Sample, Stream::Draft(3)));
        for (p, m) in [(0.0, 0.0), (1.1, 0.0), (f32::NAN, 0.0), (0.9, -0.1), (0.9, 1.1), (0.9, f32::NAN)] {
            assert!(new(1.0, p, m, Accept::Replay).is_err(), "{p} {m}");
        }
    }

    #[test]
    fn argmax_takes_the_lowest_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 5]), 0);
        assert_eq!(argmax(&[-0.0, 0.0]), 0);
        for at in [0, 15, 16, 17, 31, 99] {
            let mut logits = [-1.0; 100];
            logits[at] = 5.0;
            logits[99] = 5.0;
            assert_eq!(argmax(&logits) as usize, at);
        }
        assert_eq!(argmax(&[f32::NAN, 1.0, f32::NAN, 2.0]), 3);
    }

    #[test]
    fn unusable_logits_are_refused() {
        assert!(check_finite(&[1.0, f32::NEG_INFINITY]).is_ok());
        for bad in [&[f32::NAN, 1.0][..], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 2], &[]] {
            assert_eq!(check_finite(bad).unwrap_err().kind, crate::ErrorKind::NotFinite);
        }
        // If bans leave no token, the checkpoint is not at fault.
        assert_eq!(check_left(&[f32::NEG_INFINITY; 2]).unwrap_err(), Error::no_token_left());
        assert_eq!(check_left(&[f32::NAN, 1.0]), check_finite(&[f32::NAN, 1.0]));
        assert!(check_left(&[1.0, f32::NEG_INFINITY]).is_ok());
    }

    #[test]
    fn temperature_0_is_the_argmax_and_a_tiny_one_nearly() {
        let logits = [0.5, 2.0, 2.0, -1.0];
        let greedy = Sampler::greedy();
        assert_eq!(warp(&logits, &greedy), [0.0, 1.0, 0.0, 0.0]);
        assert!((0..50).all(|position| choose(&logits, &greedy, position, Stream::Sample) == 1));
        // 1e-40 is subnormal: quotients overflow to −∞, yet the equal maxima share the mass.
        for temperature in [1e-40, 1e-6] {
            assert_eq!(warp(&logits, &sampler(temperature, 0, 1.0, 0.0, 0)), [0.0, 0.5, 0.5, 0.0]);
            let chosen = |position| choose(&logits, &sampler(temperature, 0, 1.0, 0.0, 0), position, Stream::Sample);
            assert!((0..50).map(chosen).all(|token| token == 1 || token == 2));
            assert!((0..50).map(chosen).any(|token| token == 1) && (0..50).map(chosen).any(|token| token == 2));
        }
    }

    #[test]
    fn masked_tokens_are_never_chosen() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, -1.0];
        for sampler in [sampler(1.0, 0, 1.0, 0.0, 3), sampler(5.0, 4, 0.99, 0.01, 3)] {
            assert_eq!(warp(&logits, &sampler)[0], 0.0);
            assert!((0..200).all(|position| choose(&logits, &sampler, position, Stream::Sample) % 2 == 1));
        }
    }

    #[test]
    fn warpers_of_known_distributions() {
        let ln = |p: &[f32]| p.iter().map(|p| p.ln()).collect::<Vec<_>>();
        let close = |got: Vec<f32>, want: &[f32]| {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} {want:?}");
        };
        let logits = ln(&[0.1, 0.4, 0.2, 0.3]);
        close(warp(&logits, &sampler(1.0, 2, 1.0, 0.0, 0)), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        // 0.4 + 0.3 reach 0.65, and the token that reaches it is kept.
        close(warp(&logits, &sampler(1.0, 0, 0.65, 0.0, 0)), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        close(warp(&logits, &sampler(1.0, 0, 0.75, 0.0, 0)), &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        close(warp(&logits, &sampler(1.0, 0, 1e-6, 0.0, 0)), &[0.0, 1.0, 0.0, 0.0]);
        close(warp(&logits, &sampler(1.0, 0, 1.0, 0.6, 0)), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        close(warp(&logits, &sampler(1.0, 0, 1.0, 1.0, 0)), &[0.0, 1.0, 0.0, 0.0]);
        // Temperature applies first: at 1/2 the probabilities are squared (1, 16, 4, 9 of 30), and 16 + 9 reach 0.8.
        close(warp(&logits, &sampler(0.5, 0, 0.8, 0.0, 0)), &[0.0, 16.0 / 25.0, 0.0, 9.0 / 25.0]);
        // Top-k applies before top-p: of the two kept tokens, the first alone has 4/7.
        close(warp(&logits, &sampler(1.0, 2, 0.57, 0.0, 0)), &[0.0, 1.0, 0.0, 0.0]);
        // All ties at the k-th logit are kept, as in Hugging Face.
        close(warp(&[1.0, 0.0, 0.0, 0.0, -9.0], &sampler(1.0, 2, 1.0, 0.0, 0))[1..].to_vec(), &{
            let rest = 1.0 / (3.0 + 1f32.exp());
            [rest, rest, rest, 0.0]
        });
        // Ties inside top-p go to the lower ids.
        close(warp(&[0.0; 4], &sampler(1.0, 0, 0.5, 0.0, 0)), &[0.5, 0.5, 0.0, 0.0]);
        // Reaching the mass exactly suffices, even if the next token is far less likely.
        close(warp(&[0.0, -LN_2, -LN_2], &sampler(1.0, 0, 0.5, 0.0, 0)), &[1.0, 0.0, 0.0]);
    }

    #[test]
    fn equal_scores_of_the_race_go_to_the_lower_id() {
        let sampler = sampler(1.0, 0, 1.0, 0.0, 3);
        let mut ties = 0;
        for position in 0..2_000 {
            let noise = |id| sampler.noise(position, Stream::Sample).gumbel(id);
            // Token 1 has the larger logit, and token 0 noise that compensates exactly.
            let logit = noise(1) - noise(0);
            if logit < 0.0 && logit + noise(0) == noise(1) {
                assert_eq!(choose(&[logit, 0.0], &sampler, position, Stream::Sample), 0);
                ties += 1;
            }
        }
        assert!(ties > 100, "{ties}");
    }

    /// The warpers by definition: full sort, f64.
    fn warp_by_definition(logits: &[f32], sampler: &Sampler) -> Vec<f64> {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |id: usize| f64::from(((logits[id] - most) / sampler.temperature).exp());
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if sampler.top_k > 0 {
            let bar = logits[order[sampler.top_k.min(order.len()) - 1]];
            order.retain(|&id| logits[id] >= bar);
        }
        let total: f64 = order.iter().map(|&id| weight(id)).sum();
        let mut before = 0.0;
        if sampler.top_p < 1.0 {
            order.retain(|&id| {
                let keep = before < f64::from(sampler.top_p) * total;
                before += weight(id);
                keep
            });
        }
        order.retain(|&id| weight(id) >= f64::from(sampler.min_p));
        let total: f64 = order.iter().map(|&id| weight(id)).sum();
        let mut out = vec![0.0; logits.len()];
        order.iter().for_each(|&id| out[id] = weight(id) / total);
        out
    }

    fn any_logits() -> impl Strategy<Value = Vec<f32>> {
        // Few distinct values give ties; many tokens exercise the growing heads of top-p and the halving of top-k.
        prop_oneof![
            prop::collection::vec(-8.0f32..8.0, 1..40),
            prop::collection::vec((-6i32..6).prop_map(|i| i as f32 / 2.0), 1..40),
            // Of the wide ranges most tokens cannot win.
            (500usize..3_000, 0u64..1_000, prop_oneof![Just(6.0f32), Just(60.0)]).prop_map(|(n, seed, range)| {
                let noise = Noise { seed, sequence: 0, position: 0, stream: Stream::Sample };
                (0..n).map(|i| range * noise.uniform(i as u64)).collect()
            }),
        ]
    }

    fn any_sampler() -> impl Strategy<Value = Sampler> {
        (
            0.2f32..2.0,
            prop_oneof![Just(0), 1usize..50, 100usize..900],
            prop_oneof![Just(1.0f32), 0.05f32..0.999],
            prop_oneof![Just(0.0f32), 0.0f32..0.9],
            any::<u64>(),
        )
            .prop_map(|(t, k, p, m, seed)| sampler(t, k, p, m, seed))
    }

    proptest! {
        #[test]
        fn warping_equals_its_definition(logits in any_logits(), sampler in any_sampler()) {
            let (got, want) = (warp(&logits, &sampler), warp_by_definition(&logits, &sampler));
            let sum: f64 = got.iter().map(|p| f64::from(*p)).sum();
            prop_assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            // The cumulative sums may differ in the last bit, so one token at the limit of top-p may differ.
            let edge = want.iter().copied().filter(|p| *p > 0.0).fold(1.0, f64::min);
            let off: f64 = got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).sum();
            prop_assert!(off < 1e-5 || (sampler.top_p < 1.0 && off < 2.5 * edge), "{off} {edge}");
        }

        #[test]
        fn choosing_equals_the_full_race(logits in any_logits(), sampler in any_sampler(), position in 0usize..1_000_000) {
            let most = maximum(&logits);
            let p = warp(&logits, &sampler);
            let score = |id: usize| {
                let noise = sampler.noise(position, Stream::Draft(2)).gumbel(id as u64);
                (logits[id] - most) / sampler.temperature + noise
            };
            let kept = (0..logits.len()).filter(|&id| p[id] > 0.0);
            let want = kept.reduce(|best, id| if score(id) > score(best) { id } else { best }).unwrap();
            prop_assert_eq!(choose(&logits, &sampler, position, Stream::Draft(2)) as usize, want);
        }

        #[test]
        fn drawing_equals_the_full_race(
            weights in prop::collection::vec(prop_oneof![Just(0.0f32), 1e-6f32..2.0, 1e-12f32..1e-9], 1..400), seed: u64,
        ) {
            let noise = Noise { seed, sequence: 0, position: 11, stream: Stream::Correct(1) };
            let score = |id: usize| {
                let u = f64::from(noise.uniform(id as u64));
                f64::from(weights[id]) / -u.ln()
            };
            let want = (0..weights.len()).reduce(|best, id| if score(id) > score(best) { id } else { best }).unwrap();
            prop_assert_eq!(draw(&weights, noise) as usize, want);
        }

        #[test]
        fn the_kth_largest(values in prop::collection::vec((-20i32..20).prop_map(|i| i as f32), 1..400), k in 1usize..500) {
            let mut sorted = values.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let want = sorted.get(k - 1).copied().filter(|_| k < values.len()).unwrap_or(f32::NEG_INFINITY);
            prop_assert_eq!(kth_largest(&values, k), want);
        }
    }
}
