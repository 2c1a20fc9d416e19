//! Measurements of the γ policy: seconds of verification by number of rows, and ratios of sums (docs/design/policy.md).

use std::collections::BTreeMap;

/// Timings kept of a quantity.
const KEPT: usize = 7;
/// Timings from which on a quantity is reliable: the first may be slow.
pub(crate) const RELIABLE: usize = 2;
/// Cost of one more row, relative to the only timed row count. Optimistic for one sequence, so that drafting is tried.
const SLOPE: f64 = 0.02;

/// The last timings of one quantity, and the round of the last. Only positive finite numbers count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timings {
    pub(crate) recent: Vec<f64>,
    /// Their lower quartile, because interruptions only ever add time.
    pub(crate) seconds: f64,
    pub(crate) round: usize,
}

impl Timings {
    /// Adds a timing of round `round`.
    pub(crate) fn observe(&mut self, seconds: f64, round: usize) {
        if seconds.is_finite() && seconds > 0.0 {
            self.recent.drain(..(self.recent.len() + 1).saturating_sub(KEPT));
            self.recent.push(seconds);
            let mut sorted = self.recent.clone();
            sorted.sort_unstable_by(f64::total_cmp);
            (self.seconds, self.round) = (sorted[(sorted.len() - 1) / 4], round);
        }
    }

    /// Returns true after [`RELIABLE`] timings.
    pub(crate) fn is_reliable(&self) -> bool {
        self.recent.len() >= RELIABLE
    }
}

/// Timings of verification by rows, over all sequences.
#[derive(Clone, Debug, Default)]
pub(crate) struct Costs {
    pub(crate) by_rows: BTreeMap<usize, Timings>,
}

impl Costs {
    /// Measured seconds, or those interpolated between the neighbours. A single timing may be a slow first call: it is
    /// limited to the line through row counts that were timed more often.
    pub(crate) fn seconds(&self, rows: usize) -> Option<f64> {
        match self.by_rows.get(&rows) {
            None => self.line(rows, 1),
            Some(own) if own.is_reliable() => Some(own.seconds),
            Some(own) => Some(self.line(rows, RELIABLE).map_or(own.seconds, |line| line.min(own.seconds))),
        }
    }

    /// The line through the nearest row counts below and above, of those timed at least `times` times. Above all of them it goes
    /// through the fewest and the most: kernels take rows in tiles, so the last two may be the two sides of a step. Below all of
    /// them it goes through the nearest two. The result is at least half the lower timing.
    ///
    /// If there is only one such count, each further row costs [`SLOPE`], and fewer rows cost as much: they may be a plain step,
    /// which must not seem fast. For the same reason, no line through more rows limits a timing of fewer.
    fn line(&self, rows: usize, times: usize) -> Option<f64> {
        let point = |(&at, own): (&usize, &Timings)| (own.recent.len() >= times).then_some((at as f64, own.seconds));
        let mut below = self.by_rows.range(..rows).rev().filter_map(point);
        let mut above = self.by_rows.range(rows..).filter_map(point);
        let (left, right) = match (below.next(), above.next()) {
            (Some(left), None) => below.next_back().map_or((left, None), |fewest| (fewest, Some(left))),
            (Some(left), right) => (left, right),
            (None, right) => (right?, above.next()),
        };
        let guess = if rows as f64 > left.0 { SLOPE * left.1 } else { 0.0 };
        let slope = right.map_or(guess, |right| (right.1 - left.1) / (right.0 - left.0)).max(0.0);
        let slope = if times > 1 && (rows as f64) < left.0 { 0.0 } else { slope };
        Some((left.1 + slope * (rows as f64 - left.0)).max(0.5 * left.1))
    }
}

/// A ratio of two sums that forget exponentially.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio {
    pub(crate) numerator: f64,
    pub(crate) denominator: f64,
}

impl Ratio {
    pub(crate) fn value(self) -> f64 {
        self.numerator / self.denominator.max(f64::MIN_POSITIVE)
    }

    /// Adds to both sums, after both are multiplied by `keep`.
    pub(crate) fn add(&mut self, numerator: f64, denominator: f64, keep: f64) {
        self.numerator = self.numerator * keep + numerator;
        self.denominator = self.denominator * keep + denominator;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_between_the_last_two_entries_does_not_continue() {
        let mut costs = Costs::default();
        for (rows, seconds) in [(32, 10.0), (64, 10.2), (128, 10.6), (160, 12.2)] {
            costs.by_rows.entry(rows).or_default().observe(seconds, 0);
        }
        // The last two are 1.6 apart: 17 by their slope.
        let expected = 12.2 + 96.0 * 2.2 / 128.0;
        assert!((costs.seconds(256).unwrap() - expected).abs() < 1e-9, "{:?}", costs.seconds(256));
    }

    #[test]
    fn more_rows_limit_a_plain_step_to_their_own_time() {
        let mut costs = Costs::default();
        for (rows, seconds) in [(2, 12.0), (2, 12.0), (4, 20.0), (4, 20.0)] {
            costs.by_rows.entry(rows).or_default().observe(seconds, 0);
        }
        // The line through them is 8 at one row.
        for (timed, expected) in [(10.0, 10.0), (30.0, 12.0)] {
            costs.by_rows.insert(1, Timings::default());
            costs.by_rows.get_mut(&1).unwrap().observe(timed, 0);
            assert_eq!(costs.seconds(1), Some(expected));
        }
    }
}
