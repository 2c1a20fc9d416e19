//! The graph cache: rounds recorded as graphs, by a key of everything their launches depend on.

use std::collections::HashMap;

/// Most steps in all graphs together, enough for dozens of kinds of rounds. A step is some hundred launches, and a recorded
/// launch takes some hundred bytes.
const STEPS_MAX: usize = 512;
/// Most known kinds of rounds. Ragged batches produce many kinds, most of which do not recur.
const KINDS_MAX: usize = 4096;

/// State of a kind of round.
#[derive(Debug)]
pub(crate) enum State<T> {
    /// It ran once, launched kernel by kernel.
    Seen,
    /// The graph to launch.
    Graph(T),
    /// Recording failed; it is launched kernel by kernel.
    Refused,
}

/// Kinds of rounds by key: at most [`KINDS_MAX`], with [`STEPS_MAX`] recorded steps. If a limit is exceeded, all are dropped.
#[derive(Debug)]
pub(crate) struct Recorded<T> {
    kinds: HashMap<Vec<u64>, State<T>>,
    steps: usize,
}

impl<T> Recorded<T> {
    pub(crate) fn new() -> Recorded<T> {
        Recorded { kinds: HashMap::new(), steps: 0 }
    }

    pub(crate) fn find(&self, key: &[u64]) -> Option<&State<T>> {
        self.kinds.get(key)
    }

    /// Kinds of rounds that have a graph.
    pub(crate) fn graphs(&self) -> usize {
        self.kinds.values().filter(|state| matches!(state, State::Graph(_))).count()
    }

    /// Records the state of a kind of round of `steps` steps.
    pub(crate) fn note(&mut self, key: Vec<u64>, state: State<T>, steps: usize) {
        let steps = if matches!(state, State::Graph(_)) { steps } else { 0 };
        let more = !self.kinds.contains_key(&key);
        if self.steps + steps > STEPS_MAX || more && self.kinds.len() >= KINDS_MAX {
            self.kinds.clear();
            self.steps = 0;
        }
        self.steps += steps;
        self.kinds.insert(key, state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_graph_cache_is_bounded() {
        let mut recorded = Recorded::new();
        // All kinds twice, five steps each.
        for state in [|_| State::Seen, State::Graph] {
            for key in 0..10_000 {
                recorded.note(vec![key], state(key), 5);
                assert!(recorded.kinds.len() <= KINDS_MAX);
                assert!(recorded.graphs() * 5 <= STEPS_MAX);
                assert_eq!(recorded.steps, recorded.graphs() * 5);
            }
        }
        assert!(matches!(recorded.find(&[9_999]), Some(State::Graph(9_999))));
        assert!(recorded.find(&[0]).is_none());
    }

    #[test]
    fn a_repeated_round_is_found() {
        let mut recorded = Recorded::new();
        recorded.note(vec![1, 2], State::Seen, 3);
        assert!(matches!(recorded.find(&[1, 2]), Some(State::Seen)));
        recorded.note(vec![1, 2], State::Graph('g'), 3);
        recorded.note(vec![1], State::Refused, 3);
        assert!(matches!(recorded.find(&[1, 2]), Some(State::Graph('g'))));
        assert!(matches!(recorded.find(&[1]), Some(State::Refused)));
        assert!(recorded.find(&[2]).is_none());
        assert_eq!(recorded.steps, 3);
    }
}
