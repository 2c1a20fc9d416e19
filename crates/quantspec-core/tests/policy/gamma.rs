//! γ: its distance from the best fixed one, and its loss where speculation does not pay.

use crate::world::{Margins, Text, WORLD, World, cached, cliff, crowded, flat, linear, steep, step};
use quantspec_core::forecast::expected_tokens;
use quantspec_core::policy::Policy;
use std::collections::HashSet;

/// All combinations of machine, draft, acceptance and variant, decoded with `Policy::auto(12)`.
struct Scenario {
    name: &'static str,
    machines: &'static [fn(usize) -> f64],
    drafts: &'static [f64],
    alphas: &'static [f64],
    variants: Vec<World>,
    seeds: u64,
    tokens: usize,
    /// Upper limit of the time per token relative to plain decoding, for each seed.
    plain: f64,
    /// Share of texts that may exceed it.
    exceptions: f64,
    /// Upper limit relative to the best fixed γ, for the mean over seeds.
    best: f64,
}

const SCENARIO: Scenario = Scenario {
    name: "",
    machines: &[flat, steep],
    drafts: &[1.5, 3.0, 5.0],
    alphas: &[],
    variants: Vec::new(),
    seeds: 1,
    tokens: 4_000,
    plain: f64::INFINITY,
    exceptions: 0.0,
    best: f64::INFINITY,
};

fn scenarios() -> Vec<Scenario> {
    let alternating = |noise, period| World { noise, text: Text::Alternating(0.0, period), ..WORLD };
    let known = |margins| World { margins: Some(margins), ..WORLD };
    let cache = |cold, warming| World { cold, warming, ..WORLD };
    let loses: &[fn(usize) -> f64] = &[flat, steep, cliff, step, linear];
    let uninformed = |drafts, alphas, best| Scenario {
        name: "margins that say nothing",
        machines: &[flat, steep, linear],
        drafts,
        alphas,
        variants: vec![
            known(Margins::Always(f32::INFINITY)),
            known(Margins::Always(9.0)),
            known(Margins::Always(0.1)),
            known(Margins::Mean(1.0)),
        ],
        seeds: 12,
        tokens: 1_500,
        plain: 1.02,
        exceptions: 0.0,
        best,
    };
    vec![
        Scenario {
            name: "as good as a fixed γ",
            alphas: &[0.5, 0.7, 0.9, 0.95],
            variants: vec![WORLD],
            best: 1.06,
            ..SCENARIO
        },
        Scenario {
            name: "where little pays",
            machines: loses,
            drafts: &[0.5, 3.0, 8.0, 12.0],
            alphas: &[0.0, 0.3, 0.6, 0.8, 0.95],
            variants: vec![
                World { noise: 0.0, ..WORLD },
                World { noise: 0.05, ..WORLD },
                alternating(0.03, 10),
                alternating(0.03, 100),
            ],
            tokens: 1_500,
            plain: 1.02,
            ..SCENARIO
        },
        uninformed(&[3.0, 8.0], &[0.0, 0.3, 0.6, 0.8, 0.95], 1.08),
        uninformed(&[1.5], &[0.0, 0.3, 0.6, 0.8], 1.08),
        // If nearly all tokens of nearly free drafts are accepted, drafts that are too short lose most.
        uninformed(&[1.5], &[0.95], 1.1),
        Scenario {
            name: "a CPU cache that plain steps after a draft must fill",
            machines: &[cached],
            drafts: &[3.0, 4.0, 6.0],
            alphas: &[0.5, 0.7, 0.8],
            variants: [(1.0, 0.0), (1.3, 0.0), (1.6, 0.0), (2.0, 0.0), (1.6, 0.5), (2.0, 0.5)]
                .map(|(cold, warming)| cache(cold, warming))
                .to_vec(),
            seeds: 24,
            tokens: 1_500,
            plain: 1.02,
            exceptions: 0.015,
            best: 1.09,
        },
        Scenario {
            name: "a CPU cache that fills slowly: the slowest plain step taken for settled is 1.1 times too slow",
            machines: &[cached],
            drafts: &[3.0, 4.0, 6.0],
            alphas: &[0.5, 0.7, 0.8],
            variants: vec![cache(2.0, 0.7)],
            seeds: 24,
            tokens: 1_500,
            plain: 1.055,
            exceptions: 0.1,
            best: 1.08,
        },
        // The second plain step is the first that counts. If it seems slow, drafts that lose seem to pay until a probe.
        Scenario {
            name: "an interruption of the first plain step that counts",
            machines: &[linear, cliff],
            drafts: &[0.5, 2.0, 8.0],
            alphas: &[0.2, 0.5, 0.9],
            variants: [1.6, 2.0, 5.0].map(|second| World { second, noise: 0.0, ..WORLD }).to_vec(),
            seeds: 4,
            tokens: 1_500,
            plain: 1.02,
            ..SCENARIO
        },
        Scenario {
            name: "drafts accepted as a whole: only the ledger shows that they lose",
            machines: &[flat],
            drafts: &[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
            alphas: &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            variants: vec![World { together: true, ..WORLD }],
            tokens: 3_000,
            plain: 1.02,
            ..SCENARIO
        },
        Scenario {
            name: "a drafter that runs no network and often proposes nothing",
            drafts: &[0.001],
            alphas: &[0.0, 0.3, 0.6, 0.9],
            variants: [0.1, 0.3, 0.7].map(|proposes| World { proposes, ..WORLD }).to_vec(),
            seeds: 8,
            plain: 1.02,
            best: 1.05,
            ..SCENARIO
        },
    ]
}

#[test]
fn scenarios_stay_within_their_bounds() {
    for scenario in scenarios() {
        let cases = scenario.drafts.len() * scenario.alphas.len() * scenario.variants.len();
        let texts = scenario.machines.len() * cases * scenario.seeds as usize;
        let mut exceptions = 0;
        for &verify in scenario.machines {
            for (&draft, &alpha) in scenario.drafts.iter().flat_map(|d| scenario.alphas.iter().map(move |a| (d, a))) {
                for variant in &scenario.variants {
                    let text = match variant.text {
                        Text::Alternating(_, period) => Text::Alternating(alpha, period),
                        _ => Text::Even(alpha),
                    };
                    let (mut auto, mut best) = (0.0, 0.0);
                    for seed in 1..=scenario.seeds {
                        let world = World { draft, verify, text, seed, ..*variant };
                        let pace = world.pace(Policy::auto(12), scenario.tokens);
                        let share = pace / world.pace(Policy::fixed(0), scenario.tokens);
                        exceptions += usize::from(share >= scenario.plain);
                        assert!(
                            exceptions as f64 <= scenario.exceptions * texts as f64,
                            "{}: {share} of plain decoding's time: {world:?}",
                            scenario.name
                        );
                        auto += pace;
                        // Three texts suffice to measure a fixed γ.
                        if scenario.best.is_finite() && seed <= 3 {
                            best += world.best(12, scenario.tokens);
                        }
                    }
                    let share = auto / scenario.seeds as f64 / (best / scenario.seeds.min(3) as f64);
                    assert!(
                        scenario.best.is_infinite() || share < scenario.best,
                        "{}: {share} of the time at the best fixed γ: draft {draft}, alpha {alpha}, {variant:?}",
                        scenario.name
                    );
                }
            }
        }
    }
}

#[test]
fn expected_tokens_are_the_geometric_sum() {
    assert!((expected_tokens(0.5, 3) - (1.0 + 0.5 + 0.25 + 0.125)).abs() < 1e-12);
    assert_eq!(expected_tokens(0.0, 7), 1.0);
    assert!((expected_tokens(0.999, 4) - 5.0).abs() < 0.02);
}

#[test]
fn fixed_gamma_stays() {
    let mut policy = Policy::fixed(5);
    World { text: Text::Even(0.0), ..WORLD }.run(&mut policy, 50);
    assert_eq!((policy.gamma(), policy.stop()), (5, None));
    assert_eq!(Policy::fixed(0).gamma(), 0);
}

#[test]
fn the_first_tokens_are_near_the_best_fixed_gamma() {
    // Cost of a draft step and of five rows relative to a plain step, on a CPU and on a GPU.
    let cpu = |rows: usize| 10.0 + 0.15 * (rows - 1) as f64;
    let gpu = |rows: usize| 10.0 + 0.2 * (rows - 1) as f64;
    for (draft, verify) in [(2.7, cpu as fn(usize) -> f64), (2.9, cpu), (4.5, gpu)] {
        for (alpha, goal) in [(0.8, 0.961), (0.85, 0.953), (0.9, 0.946), (0.95, 0.923)] {
            for tokens in [64, 96] {
                // Mean over texts of this length, each with a new policy.
                let seconds = |policy: &Policy| -> f64 {
                    let world = |seed| World { seed, draft, verify, text: Text::Even(alpha), ..WORLD };
                    (0..200).map(|seed| world(seed).pace(policy.clone(), tokens)).sum()
                };
                let best = (0..=12).map(|gamma| seconds(&Policy::fixed(gamma))).fold(f64::INFINITY, f64::min);
                let share = best / seconds(&Policy::auto(12));
                assert!(share > goal, "draft {draft} alpha {alpha} tokens {tokens}: {share}");
            }
        }
    }
}

#[test]
fn margins_beat_the_best_fixed_gamma() {
    // Mean margins at which .83, .9 and .98 of the tokens are accepted, and a scale for the policy to find.
    for (draft, mean, scale) in
        [(2.7, 0.87, 0.45), (2.9, 0.87, 0.45), (2.7, 1.8, 0.45), (4.5, 1.8, 0.45), (2.7, 1.8, 0.05), (2.7, 5.0, 3.0)]
    {
        let worlds =
            (1..=16).map(|seed| World { seed, draft, margins: Some(Margins::Mean(mean)), scale: Some(scale), ..WORLD });
        let share: f64 = worlds.map(|world| world.pace(Policy::auto(12), 4_000) / world.best(12, 4_000) / 16.0).sum();
        // At a small scale no margin is short, so early end gains little.
        let bound = if scale == 0.05 { 0.992 } else { 0.98 };
        assert!(share < bound, "draft {draft} margin {mean}, {scale}: {share} of the time at the best fixed γ");
    }
}

#[test]
fn a_step_in_the_cost_of_rows_ends_no_short_draft() {
    // An 8B model on an H100 after 128k, 32k and 4k tokens: attention takes eight rows at a time.
    let long = |rows: usize| 7.6 + 0.06 * (rows - 1) as f64 + if rows > 8 { 2.8 } else { 0.0 };
    let medium = |rows: usize| 5.4 + 0.05 * (rows - 1) as f64 + if rows > 8 { 0.7 } else { 0.0 };
    let short = |rows: usize| 5.0 + 0.05 * (rows - 1) as f64;
    for (verify, bound) in [(long as fn(usize) -> f64, 0.985), (medium, 0.975), (short, 0.975)] {
        // Mean margins at which .85, .88 and .92 of the tokens are accepted.
        for mean in [0.87, 1.2, 1.8] {
            let margins = Some(Margins::Mean(mean));
            let world = |seed| World { seed, draft: 1.8, verify, margins, scale: Some(0.36), ..WORLD };
            let share = |seed| world(seed).pace(Policy::auto(16), 3_000) / world(seed).best(16, 3_000);
            let mean_share = (1..=16).map(share).sum::<f64>() / 16.0;
            assert!(mean_share < bound, "{} ms, margin {mean}: {mean_share} of the best fixed γ's time", verify(9));
        }
    }
}

#[test]
fn failing_drafts_are_given_up() {
    // Every verification fails after its draft, and is replaced by a plain step.
    let (mut policy, mut seconds) = (Policy::auto(8), 0.0);
    for _ in 0..1_000 {
        if policy.gamma() > 0 {
            let failed = 3.0 * policy.gamma() as f64 + 10.0;
            seconds += failed;
            policy.observe_draft(failed, policy.gamma());
            policy.observe_failure();
        }
        seconds += 10.0;
        policy.observe_verify(1, 10.0);
    }
    assert!(seconds < 1.02 * 10.0 * 1_000.0, "{seconds}");
}

#[test]
fn exploration_ends_where_no_acceptance_pays() {
    // A draft step takes 0.85 of a plain one, and each further row 0.3 of it.
    let world = World { draft: 8.5, verify: |rows| 10.0 + 3.0 * (rows as f64 - 1.0), text: Text::Even(1.0), ..WORLD };
    let rounds = |seed| {
        let run = World { seed, ..world }.run(&mut Policy::auto(12), 200);
        run.gammas.iter().filter(|(gamma, _)| *gamma > 0).count()
    };
    let mean = (0..100).map(rounds).sum::<usize>() as f64 / 100.0;
    assert!(mean < 4.0, "{mean}");
}

#[test]
fn the_ledger_ends_what_the_model_cannot_see() {
    // One of four sequences drafts with high acceptance; the others have ended and wait. Acceptance and costs predict a gain.
    let (mut policy, mut seconds, mut tokens) = (Policy::auto(8), 0.0, 0);
    for round in 0..3_000 {
        let gamma = policy.gamma();
        let accepted = (0..gamma).take_while(|i| WORLD.uniform(round, *i as u64) < 0.95).count();
        if gamma > 0 {
            policy.observe_draft(3.0 * gamma as f64, gamma);
            policy.observe_round(gamma, accepted);
        }
        policy.observe_verify(4 + gamma, flat(4 + gamma));
        seconds += 3.0 * gamma as f64 + flat(4 + gamma);
        tokens += 4 + accepted;
    }
    let plain = flat(4) * tokens as f64 / 4.0;
    assert!(seconds < 1.02 * plain, "{}", seconds / plain);
}

/// γ of `rounds` rounds, with costs that depend on the round.
fn gammas(max: usize, rounds: usize, alpha: f64, mut costs: impl FnMut(usize, usize) -> (f64, f64)) -> Vec<usize> {
    let mut policy = Policy::auto(max);
    let round = |round| {
        let gamma = policy.gamma();
        let (draft, verify) = costs(round, gamma);
        if gamma > 0 {
            policy.observe_draft(draft, gamma);
            let accepted = (0..gamma).take_while(|i| WORLD.uniform(round, *i as u64) < alpha).count();
            policy.observe_round(gamma, accepted);
        }
        policy.observe_verify(gamma + 1, verify);
        gamma
    };
    (0..rounds).map(round).collect()
}

#[test]
fn early_rejections_do_not_end_drafting() {
    // Int8 weights on a GPU: a draft step takes .64 of a plain step. The first three drafts are rejected.
    let (mut policy, mut drafts, mut late) = (Policy::auto(8), 0, 0);
    for round in 0..200 {
        let gamma = policy.gamma();
        if gamma > 0 {
            policy.observe_draft(6.4 * gamma as f64, gamma);
            let accepts = |i: &usize| drafts >= 3 && WORLD.uniform(round, *i as u64) < 0.88;
            policy.observe_round(gamma, (0..gamma).take_while(accepts).count());
            drafts += 1;
            late += usize::from(round >= 50);
        }
        policy.observe_verify(gamma + 1, 10.0 + 0.25 * gamma as f64);
    }
    assert!(late > 60, "drafts in {late} of the last 150 rounds");
}

#[test]
fn costs_that_fall_are_noticed() {
    // Long windows are expensive at first, and their last timings show that until they expire.
    let gammas = gammas(8, 1_200, 1.1, |round, gamma| {
        let more = if round < 200 && gamma > 2 { 40.0 } else { 0.0 };
        (2.0 * gamma as f64, flat(gamma + 1) + more)
    });
    assert!(gammas[199] <= 2 && gammas[1_199] >= 7, "{} {}", gammas[199], gammas[1_199]);
}

#[test]
fn costs_that_grow_with_the_context_are_followed() {
    // Verifying many rows becomes expensive, so γ must fall.
    let gammas = gammas(12, 4_000, 0.9, |round, gamma| {
        let slope = 0.02 + 0.3 * round as f64 / 4_000.0;
        (3.0 * gamma as f64, 10.0 * (1.0 + slope * gamma as f64))
    });
    let mean = |x: &[usize]| x.iter().sum::<usize>() as f64 / x.len() as f64;
    let (early, late) = (mean(&gammas[..500]), mean(&gammas[3_500..]));
    assert!(early > late + 1.0 && late > 0.5, "{early} {late}");
}

#[test]
fn a_slow_first_call_is_ignored() {
    // The first round of every shape takes 20 times as long.
    let mut seen = HashSet::new();
    let mut gammas = gammas(8, 100, 0.9, |_, gamma| {
        let first = if seen.insert(gamma) { 20.0 } else { 1.0 };
        (3.0 * gamma as f64 * first, flat(gamma + 1) * first)
    });
    let pace = |&gamma: &usize| WORLD.pace(Policy::fixed(gamma), 3_000);
    let best = (0..=8).min_by(|a, b| pace(a).total_cmp(&pace(b))).unwrap();
    gammas.sort_unstable();
    assert!(gammas[50].abs_diff(best) <= 2, "{} {best}", gammas[50]);
}

#[test]
fn falls_to_plain_decoding_and_recovers() {
    let run = World { text: Text::Gap, ..WORLD }.run(&mut Policy::auto(12), 10_000);
    let share = [500..2_000, 2_200..6_000, 7_000..usize::MAX].map(|span| {
        let rounds: Vec<usize> = run.gammas.iter().filter(|(_, at)| span.contains(at)).map(|round| round.0).collect();
        rounds.iter().filter(|gamma| **gamma == 0).count() as f64 / rounds.len() as f64
    });
    assert!(share[0] < 0.1 && share[1] > 0.95 && share[2] < 0.1, "{share:?}");
}

#[test]
fn a_stall_after_the_prompt_costs_little() {
    for (slow, most, seldom) in [(1, 1.02, 1.1), (2, 1.035, 1.2), (3, 1.025, 1.15), (4, 1.025, 1.15)] {
        let mut runs = Vec::new();
        for verify in [flat as fn(usize) -> f64, steep, step, linear] {
            for (draft, alpha) in [3.0, 8.0].into_iter().flat_map(|draft| [0.0, 0.3, 0.6].map(|alpha| (draft, alpha))) {
                let world = |seed| World { seed, slow, draft, verify, text: Text::Even(alpha), ..WORLD };
                runs.extend((0..40).map(|seed| world(seed).pace(Policy::auto(12), 128) / 10.0));
            }
        }
        runs.sort_unstable_by(f64::total_cmp);
        let (mean, worst) = (runs.iter().sum::<f64>() / runs.len() as f64, runs[runs.len() * 49 / 50]);
        assert!(mean < most && worst < seldom, "{slow} slow rounds: {mean} on average, {worst} in one of fifty");
    }
}

#[test]
fn interruptions_seldom_end_drafts_that_pay() {
    for (interrupted, most) in [(0.1, 12), (0.2, 45)] {
        let world = |seed| World { seed, interrupted, draft: 4.5, verify: steep, text: Text::Even(0.8), ..WORLD };
        let plain = |&seed: &u64| {
            let run = world(seed).run(&mut Policy::auto(12), 512);
            run.gammas.iter().filter(|round| round.0 == 0).count() * 2 > run.gammas.len()
        };
        let found = (0..400).filter(plain).count();
        assert!(found < most, "{found} of 400 texts are mostly plain if {interrupted} of the timings are interrupted");
    }
}

#[test]
fn batches_are_costed_by_their_rows() {
    // Sixteen sequences make verification compute-bound beyond 32 rows: γ = 1 is best.
    // On average over texts: in a few, slow timings of many rows overdraw the ledger, and plain rounds follow.
    let (world, mut policy) = (World { draft: 2.0, verify: crowded, ..WORLD }, Policy::default());
    let (mut ones, mut rounds, mut texts) = (0, 0, 0);
    for seed in 1..25 {
        let world = World { seed, ..world };
        policy = Policy::auto(12);
        // It knew another batch before.
        world.run(&mut policy, 3);
        let run = World { batch: 16, ..world }.run(&mut policy, 1_000);
        let found = run.gammas.iter().filter(|round| round.0 == 1).count();
        texts += usize::from(found * 10 > run.gammas.len() * 9);
        (ones, rounds) = (ones + found, rounds + run.gammas.len());
    }
    assert!(texts > 18 && ones * 10 > rounds * 9, "{ones} of {rounds}, nearly all in {texts} texts");
    // With one sequence, rows are free, and γ must rise.
    let run = world.run(&mut policy, 2_000);
    let long = run.gammas[50..].iter().filter(|round| round.0 >= 4).count();
    assert!(long * 10 > run.gammas.len() * 8, "{long} of {}", run.gammas.len());
}

#[test]
fn unusable_timings_are_ignored() {
    let world = World { draft: 2.0, ..WORLD };
    let drafts = |policy: Policy| world.pace(policy, 2_000) < 7.0;
    let mut policy = Policy::auto(4);
    policy.observe_draft(1.0, 0);
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        policy.observe_draft(bad, 1);
        policy.observe_verify(1, bad);
        // A single high cost is accepted for a plain step, and not after a draft.
        let mut other = Policy::auto(4);
        for seconds in [100.0, bad, bad] {
            other.observe_verify(1, seconds);
            assert_eq!(other.gamma(), 0);
        }
        assert!(drafts(other.clone()));
        world.run(&mut other, 100);
        other.observe_verify(1, bad);
        assert!(drafts(other), "{bad}");
    }
    assert_eq!(policy.gamma(), 0);
    assert!(drafts(policy));
    assert!(world.run(&mut Policy::auto(0), 100).gammas.iter().all(|round| round.0 == 0));
}

#[test]
fn copies_have_a_break_even_and_count_in_the_ledger() {
    assert_eq!(Policy::fixed(5).break_even(3), None);
    let mut policy = Policy::auto(12);
    assert_eq!(policy.break_even(3), Some(f64::INFINITY), "no plain step was timed");
    // A draft step takes 0.3 plain steps, and every drafted token is accepted: γ 12 emits 13 tokens in 4.84 plain steps.
    for _ in 0..60 {
        let gamma = policy.gamma();
        if gamma > 0 {
            policy.observe_draft(0.3 * gamma as f64, gamma);
            policy.observe_round(gamma, gamma);
        }
        policy.observe_verify(gamma + 1, 1.0 + 0.02 * gamma as f64);
    }
    let break_even = policy.break_even(5).unwrap();
    assert!((break_even - 1.1 * 13.0 / 4.84).abs() < 0.1, "{break_even}");
    // Rejected copies cost a plain step's tokens each time, until rounds are plain.
    for _ in 0..60 {
        policy.observe_copied(12, 0);
        policy.observe_verify(13, 1.24);
    }
    assert_eq!(policy.gamma(), 0);
}
