//! Guesses change the number of draft steps, and no bit of what is drafted: tokens, margins and distributions.

#[path = "support/random.rs"]
#[allow(dead_code, reason = "one shape is enough here")]
mod random;

use quantspec_core::cache::G;
use quantspec_core::config::{Pages, View, Weights};
use quantspec_core::penalty::{self, Penalties};
use quantspec_core::sample::{Accept, Sampler};
use quantspec_cpu::CpuBackend;
use quantspec_model::backend::{DraftConfig, Hooks, KvCache, Options, TokenSampler, Turn};
use quantspec_model::forward::{self, Guess};
use random::Shape;
use std::sync::Arc;

const GAMMA: usize = 9;

/// Drafts of the second sequence are shorter. The first crosses a page border, where a fourth page becomes visible.
const PROMPTS: [(usize, usize); 2] = [(5 * G - 4, GAMMA), (2 * G + 9, 6)];

/// Guesses the tokens of an earlier draft, with every `wrong`-th token of a sequence replaced.
struct Script<'a> {
    drafted: &'a [Vec<u32>],
    wrong: usize,
    at: [usize; PROMPTS.len()],
    steps: usize,
    right: usize,
}

impl Guess for Script<'_> {
    fn guess(&mut self, slot: usize, most: usize) -> Vec<u32> {
        let at = self.at[slot];
        let token = |i: usize| self.drafted[slot][i] ^ u32::from((i + 1).is_multiple_of(self.wrong));
        (at..at + most).map(token).collect()
    }

    fn chosen(&mut self, slot: usize, guessed: usize, tokens: &[u32]) {
        assert!(tokens.len() <= guessed + 1);
        assert_eq!(tokens, &self.drafted[slot][self.at[slot]..][..tokens.len()]);
        self.at[slot] += tokens.len();
        self.steps += usize::from(slot == 0);
        self.right += tokens.len() - 1;
    }
}

/// Drafted tokens of each sequence, margins (of a sequence alone) and distributions (under rejection).
type Drafted = (Vec<Vec<u32>>, Vec<f32>, Vec<Vec<f32>>);

fn drafted(backend: &mut CpuBackend, config: &DraftConfig, turns: &[Turn], guesses: Option<&mut dyn Guess>) -> Drafted {
    for turn in turns {
        backend.set_window(turn.slot, &[7]).expect("window");
    }
    let mut turns = turns.to_vec();
    forward::draft_now(backend, config, &mut turns, guesses).expect("draft");
    let mut all = Drafted::default();
    for turn in &turns {
        all.0.push(backend.window(turn.slot, turn.gamma + 1).expect("window").split_off(1));
        if turn.sampler.accept == Accept::Rejection {
            all.2.extend((0..turn.gamma).map(|offset| backend.distribution(turn.slot, offset).expect("kept")));
        }
    }
    all.1.extend(&turns[0].margins);
    all
}

#[test]
fn guesses_change_no_bit_of_a_draft() {
    let shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };
    let options = Options { rejection: true, page_masses: true, block_rows: 64, threads: 2, ..Options::new(2, 6 * G) };
    let mut backend = CpuBackend::load(&shape.checkpoint(3), &options, Hooks::default()).expect("load");
    for (slot, (length, _)) in PROMPTS.into_iter().enumerate() {
        backend.open(slot, 6 * G).expect("open");
        let prompt = random::tokens(shape.vocab, length, 5 + slot as u64);
        forward::prefill(&mut backend, slot, &prompt, 64, &mut |_, _| ()).expect("prefill");
    }
    let sampler = |accept| Sampler { temperature: 1.0, seed: 5, accept, ..Sampler::greedy() };
    let penalties = Penalties::new(1.3, 0.5, 0.1, 3).expect("penalties");
    let samplers = [
        Sampler::greedy(),
        Sampler { penalties, ..Sampler::greedy() },
        sampler(Accept::Replay),
        sampler(Accept::Rejection),
    ];
    let weights = [Weights::Draft, Weights::Full, Weights::Draft4];
    let choices = [Pages::All, Pages::Best(2), Pages::Window(2), Pages::Snap { pages: 2, refresh: 1 }];
    for (case, pages) in weights.iter().flat_map(|weights| choices.map(|pages| (weights, pages))).enumerate() {
        let view = if case % 2 == 0 { View::Upper } else { View::Both };
        let config = DraftConfig { weights: *pages.0, view, pages: pages.1 };
        for sampler in &samplers {
            let turn = |(slot, (length, gamma)): (usize, (usize, usize))| {
                let text = random::tokens(shape.vocab, length, 5 + slot as u64);
                let history = penalty::history(&text, sampler.penalties, 0).map(Arc::new);
                Turn { history, ..Turn::new(slot, length, gamma, sampler.clone()) }
            };
            let turns: Vec<Turn> = PROMPTS.into_iter().enumerate().map(turn).collect();
            let stop = quantspec_core::stop::Stop { min_acceptance: 1e-9, margin_scale: 1.0 };
            let alone = [Turn { stop: Some(stop), ..turns[0].clone() }];
            for turns in [&turns[..], &alone] {
                let plain = drafted(&mut backend, &config, turns, None);
                for (wrong, steps) in [(1, GAMMA), (3, GAMMA.div_ceil(3)), (usize::MAX, 1)] {
                    let mut script = Script { drafted: &plain.0, wrong, at: [0; 2], steps: 0, right: 0 };
                    let guessed = drafted(&mut backend, &config, turns, Some(&mut script));
                    assert!(guessed == plain, "{config:?}, {:?}, every {wrong}-th guess is wrong", sampler.accept);
                    assert_eq!((script.steps, script.right > 0), (steps, wrong > 1), "{config:?}");
                }
            }
        }
    }
}
