//! Candidates that read more or fewer pages, with γ chosen for each.

use crate::world::{Text, WORLD, World, cliff, flat, linear, steep};
use proptest::array::uniform4;
use proptest::prelude::*;
use quantspec_core::forecast;
use quantspec_core::policy::Policy;

/// A simulated machine whose candidates read all pages, or at most a given number.
#[derive(Clone, Copy)]
struct Library {
    world: World,
    /// Milliseconds of a draft step: for the weights, and per page read.
    weights: f64,
    page: f64,
    /// Acceptance by candidate.
    alphas: [f64; 4],
    /// Initial number of pages, and tokens per page.
    pages: usize,
    growth: usize,
}

/// Most pages that a candidate reads, as with `--draft-pages auto`.
pub(crate) const READ: [usize; 4] = [usize::MAX, 16, 64, 256];

impl Library {
    /// Time per token relative to plain decoding, and the candidate of each drafting round, with the candidates `offered`.
    fn run(&self, policy: &mut Policy, offered: &[usize], tokens: usize) -> (f64, Vec<usize>) {
        let (mut seconds, mut emitted, mut used) = (0.0, 0, vec![]);
        for round in 0.. {
            let visible = self.pages + emitted / self.growth;
            let usable = |index: usize| index == 0 || READ[offered[index]] <= visible * 2 / 3;
            let forecast = |index| if usable(index) { f64::INFINITY } else { 0.0 };
            let prior = |&candidate: &usize| {
                let left_out = visible as f64 / READ[candidate].min(visible).max(1) as f64;
                forecast::Prior {
                    bytes: 0.0,
                    alpha: 0.95,
                    rejections: left_out.powf(0.2),
                    reads: forecast::Reads::DraftWeights,
                }
            };
            let priors: Vec<_> = offered.iter().filter(|_| self.world.told).map(prior).collect();
            policy.observe_forecasts(&(0..offered.len()).map(forecast).collect::<Vec<_>>(), &priors);
            let (gamma, candidate) = (policy.gamma(), offered[policy.candidate()]);
            assert!(policy.candidate() == 0 || READ[candidate] <= visible * 2 / 3, "{candidate} of {visible} pages");
            let draft = (self.weights + self.page * READ[candidate].min(visible) as f64) * gamma as f64;
            let accepts = |i: &usize| self.world.uniform(round, *i as u64) < self.alphas[candidate];
            let accepted = (0..gamma).take_while(accepts).count();
            if gamma > 0 {
                policy.observe_draft(self.world.timed(draft, round, 0), gamma);
                policy.observe_round(gamma, accepted);
                used.push(candidate);
            }
            let verify = (self.world.verify)(gamma + 1);
            policy.observe_verify(gamma + 1, self.world.timed(verify, round, 1));
            seconds += draft + verify;
            emitted += accepted + 1;
            if emitted >= tokens {
                break;
            }
        }
        (seconds / (emitted as f64 * (self.world.verify)(1)), used)
    }
}

const LIBRARY: Library =
    Library { world: WORLD, weights: 2.0, page: 0.01, alphas: [0.9; 4], pages: 1_000, growth: 128 };
const ALL: [usize; 4] = [0, 1, 2, 3];

fn share_of_few(used: &[usize]) -> f64 {
    used.iter().filter(|candidate| **candidate > 0).count() as f64 / used.len() as f64
}

#[test]
fn candidate_and_gamma_come_close_to_the_best_pair() {
    for page in [0.0, 0.002, 0.01] {
        for losses in [[0.0, 0.0, 0.0], [0.02, 0.01, 0.0], [0.5, 0.05, 0.01], [0.9, 0.9, 0.9]] {
            let alphas = [0.93, 0.93 - losses[0], 0.93 - losses[1], 0.93 - losses[2]];
            let library = Library { page, alphas, ..LIBRARY };
            let pairs = ALL.into_iter().flat_map(|one| (0..=12).map(move |gamma| (one, gamma)));
            let best = pairs
                .map(|(one, gamma)| library.run(&mut Policy::fixed(gamma), &[one], 3_000).0)
                .fold(f64::INFINITY, f64::min);
            let (auto, used) = library.run(&mut Policy::auto(12).with_candidates(4), &ALL, 3_000);
            assert!(auto < best * 1.08, "page {page} losses {losses:?}: {auto} against {best}");
            // Where nothing pays, drafts are probes.
            assert!(used.len() > if best < 0.95 { 200 } else { 40 }, "{} {best}", used.len());
        }
    }
}

/// Drafts of a model with the shape of Llama-2-7B after 130,000 tokens on an H200. 64 pages are best. Their few tokens alone rank
/// candidates by chance, which takes 3 % more time.
#[test]
fn expected_rejections_find_the_best_pages_soon() {
    let mean = |told, offered: &[usize]| -> f64 {
        let alphas = [0.93, 0.8, 0.865, 0.9];
        let run = |seed| {
            let world = World { seed, told, ..WORLD };
            let library = Library { world, weights: 1.22, page: 0.0031, alphas, pages: 1_016, growth: 128 };
            library.run(&mut Policy::auto(12).with_candidates(offered.len()), offered, 448).0
        };
        (0..100).map(run).sum::<f64>() / 100.0
    };
    let (best, auto, alone) = (mean(true, &[2]), mean(true, &ALL), mean(false, &ALL));
    assert!(auto < 1.035 * best && auto < 0.97 * alone, "{auto} against {best}, {alone} without");
}

#[test]
fn candidates_lose_little_against_plain_decoding() {
    for verify in [flat as fn(usize) -> f64, steep, cliff, linear] {
        for (weights, page) in [(0.5, 0.0), (3.0, 0.003), (3.0, 0.02), (8.0, 0.01), (12.0, 0.0)] {
            for all in [0.0, 0.3, 0.6, 0.8, 0.95] {
                for few in [0.0, 0.5, 1.0] {
                    for noise in [0.0, 0.05] {
                        let alphas = [all, all * few, all * few, all * few];
                        let world = World { noise, verify, ..WORLD };
                        let library = Library { world, weights, page, alphas, pages: 900, growth: 128 };
                        let (auto, _) = library.run(&mut Policy::auto(12).with_candidates(4), &ALL, 1_500);
                        assert!(auto < 1.02, "{weights} {page} alpha {all} x {few} noise {noise}: {auto}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_context_that_grows_moves_drafts_to_fewer_pages() {
    // One page per token: the end of the text sees 4,000 pages, the start none.
    let library = Library { alphas: [0.95, 0.92, 0.92, 0.92], pages: 0, growth: 1, ..LIBRARY };
    let (_, used) = library.run(&mut Policy::auto(12).with_candidates(4), &ALL, 4_000);
    assert_eq!(share_of_few(&used[..4]), 0.0);
    assert!(share_of_few(&used[used.len() / 2..]) > 0.9, "{}", share_of_few(&used[used.len() / 2..]));
}

#[test]
fn a_candidate_that_proposes_nothing_does_not_hold_up_the_other() {
    for silent in [0, 1] {
        let (mut policy, mut rounds) = (Policy::auto(8).with_candidates(2), 0);
        for round in 0..1_000 {
            let gamma = if policy.candidate() == silent { 0 } else { policy.gamma() };
            let accepted = (0..gamma).take_while(|i| WORLD.uniform(round, *i as u64) < 0.9).count();
            if gamma > 0 {
                policy.observe_draft(3.0 * gamma as f64, gamma);
                policy.observe_round(gamma, accepted);
            }
            policy.observe_verify(gamma + 1, flat(gamma + 1));
            rounds += usize::from(gamma > 0);
        }
        assert!(rounds > 950, "{rounds} rounds of 1,000 drafted");
    }
}

#[test]
fn fixed_gamma_still_chooses_a_candidate() {
    let mut policy = Policy::fixed(4).with_candidates(4);
    let (_, used) = LIBRARY.run(&mut policy, &ALL, 1_000);
    assert_eq!(policy.gamma(), 4);
    assert!(share_of_few(&used) > 0.9, "{}", share_of_few(&used));
    // A shorter text follows in the same slot.
    policy.observe_forecasts(&[0.0; 4], &[]);
    assert_eq!(policy.candidate(), 0);
}

#[test]
fn fixed_gamma_finds_out_soon_whether_fewer_pages_pay() {
    // Mean time per token over texts, with these candidates.
    let mean = |page: f64, pages: usize, few: f64, slow: usize, offered: &[usize], tokens: usize| -> f64 {
        let run = |seed| {
            let world = World { seed, slow, ..WORLD };
            let library = Library { world, page, alphas: [0.9, few, few, few], pages, ..LIBRARY };
            library.run(&mut Policy::fixed(4).with_candidates(offered.len()), offered, tokens).0
        };
        (0..40).map(run).sum::<f64>() / 40.0
    };
    // Slow first rounds, so that later ones seem fast.
    for slow in 0..=4 {
        for (tokens, bad, good) in [(64, [1.27, 1.57], 1.55), (128, [1.17, 1.36], 1.35), (512, [1.05, 1.18], 1.14)] {
            // Reading few pages takes nearly as long and lowers acceptance. With one alternative, and with three.
            for (pages, page, bad) in [(64, 0.002, bad[0]), (640, 0.0002, bad[1])] {
                for few in [0.0, 0.3, 0.6] {
                    let all = mean(page, pages, few, slow, &[0], tokens);
                    let auto = mean(page, pages, few, slow, &ALL, tokens);
                    let case = format!("{pages} pages, alpha {few}, {slow} slow, {tokens} tokens");
                    assert!(auto < bad * all, "{case}: {auto}, {all}");
                }
            }
            // Reading all pages takes five times as long as reading few.
            for few in [0.85, 0.9] {
                let best = mean(0.01, 1_000, few, slow, &[1], tokens);
                let auto = mean(0.01, 1_000, few, slow, &ALL, tokens);
                assert!(auto < good * best, "alpha {few}, {slow} slow, {tokens} tokens: {auto}, {best}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_same_observations_give_the_same_choices(
        max in 0usize..17, draft in 0.5f64..12.0, alphas in uniform4(0.0f64..1.0), page in 0.0f64..0.02, seed: u64, batch in 1usize..6,
    ) {
        let world = World { seed, batch, draft, verify: steep, text: Text::Even(alphas[0]), ..WORLD };
        let run = || world.run(&mut Policy::auto(max), 300).gammas;
        prop_assert_eq!(run(), run());
        prop_assert!(run().iter().all(|round| round.0 <= max));
        let library = Library { world, weights: draft, page, alphas, pages: 600, growth: 64 };
        let run = || library.run(&mut Policy::auto(max).with_candidates(4), &ALL, 300);
        prop_assert_eq!(run(), run());
    }
}
