//! `--method auto`: candidates that differ in weights, cache view and pages.

use crate::pages::READ;
use crate::world::{WORLD, World, cliff, flat, linear};
use quantspec_core::forecast::{self, expected_tokens};
use quantspec_core::policy::Policy;
use std::collections::HashSet;

/// A way to draft: time of its step relative to a plain one, acceptance, and the properties known in advance.
#[derive(Clone, Copy, Debug)]
struct Way {
    step: f64,
    alpha: f64,
    known: forecast::Prior,
}

/// Tokens and time, in plain steps, of each sequence's first `first` tokens, and of the rest up to `tokens`, with ways to draft
/// instead of the world's own. `auto`: forecasts are given. The first draft of each way takes `slow_first` times as long.
fn choose_among(
    world: &World,
    mut policy: Policy,
    ways: &[Way],
    auto: bool,
    slow_first: f64,
    [first, tokens]: [usize; 2],
) -> [(usize, f64); 2] {
    let known: Vec<forecast::Prior> = ways.iter().map(|way| way.known).collect();
    let (mut parts, mut round, mut drafted) = ([(0, 0.0); 2], 0, HashSet::new());
    let batch = world.batch;
    while parts[0].0 + parts[1].0 < tokens * batch {
        if auto {
            let priors = if world.told { &known[..] } else { &[] };
            let usable = vec![true; ways.len()];
            policy.observe_forecasts(&forecast::forecasts(&usable, &known, &policy.measured()), priors);
        }
        let (gamma, way) = (policy.gamma(), ways[policy.candidate()]);
        let is_first = gamma > 0 && drafted.insert(policy.candidate());
        let draft = way.step * gamma as f64 * if is_first { slow_first } else { 1.0 };
        let verify = (world.verify)(batch * (gamma + 1)) / 10.0;
        if gamma > 0 {
            policy.observe_draft(world.timed(draft, round, 0), gamma);
        }
        let part = &mut parts[usize::from(parts[0].0 >= first * batch)];
        for sequence in 0..batch {
            let accepts = |i: &usize| world.uniform(round, (sequence * 20 + i) as u64) < way.alpha;
            let accepted = (0..gamma).take_while(accepts).count();
            if gamma > 0 {
                policy.observe_round(gamma, accepted);
            }
            part.0 += accepted + 1;
        }
        part.1 += draft + verify;
        policy.observe_verify(batch * (gamma + 1), world.timed(verify, round, 1));
        round += 1;
    }
    parts
}

/// A scenario of `--method auto`: a model, a context of 1,024 pages and a machine. Costs are in plain steps.
#[derive(Clone, Copy, Debug)]
struct Scene {
    /// Bytes of the weights, relative to those of weights and cache.
    weights: f64,
    /// Time of a step over 4-bit weights, relative to the time of their bytes.
    slow: f64,
    /// Acceptance with 4-bit weights and with the upper nibbles, and the loss by reading 16 pages.
    w4: f64,
    kv4: f64,
    loss: f64,
    /// How many times as long the first draft of each way takes.
    first: f64,
    /// As in [`World`].
    told: bool,
}

impl Scene {
    fn way(&self, w4: bool, kv4: bool, read: usize) -> Way {
        let share = read.min(1_024) as f64 / 1_024.0;
        let cache = (1.0 - self.weights) * share * if kv4 { 0.515 } else { 1.0 };
        let (weights, slow) = if w4 { (0.27 * self.weights, self.slow) } else { (self.weights, 1.0) };
        let kept = 1.0 - self.loss * if read < 1_024 { 4.0 / (read as f64).sqrt() } else { 0.0 };
        let alpha = kept * if w4 { self.w4 } else { 1.0 } * if kv4 { self.kv4 } else { 1.0 };
        let hoped = if w4 { 0.95 } else { 0.99 };
        let known = forecast::Prior {
            bytes: weights + cache,
            alpha: hoped,
            rejections: 1.0 - hoped + 0.05 * ((1.0 / share).powf(0.2) - 1.0),
            reads: if w4 { forecast::Reads::DraftWeights } else { forecast::Reads::TargetWeights },
        };
        Way { step: weights * slow + cache, alpha: alpha.min(0.995), known }
    }

    /// Choices of a user: each method with each choice of pages, and with pages by measurement.
    fn methods(&self) -> [Vec<Way>; 3] {
        // Without a cache there are no pages to choose.
        let reads = if self.weights < 1.0 { &READ[..] } else { &READ[..1] };
        let over = |w4| reads.iter().map(move |&read| self.way(w4, true, read)).collect();
        [over(true), over(false), vec![self.way(true, false, usize::MAX)]]
    }

    fn run(
        &self,
        ways: &[Way],
        auto: bool,
        verify: fn(usize) -> f64,
        seed: u64,
        spans: [usize; 2],
    ) -> [(usize, f64); 2] {
        let policy = Policy::auto(12).with_candidates(ways.len());
        choose_among(&World { seed, verify, told: self.told, ..WORLD }, policy, ways, auto, self.first, spans)
    }

    /// Time per token of the first 256 tokens, and of the next 2,048, each the mean of `seeds` texts.
    fn paces(&self, ways: &[Way], auto: bool, seeds: u64) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for seed in 0..seeds {
            let parts = self.run(ways, auto, flat, seed, [256, 2_304]);
            sums = [0, 1].map(|part| sums[part] + parts[part].1 / parts[part].0 as f64);
        }
        sums.map(|sum| sum / seeds as f64)
    }

    /// Time per token of `auto` relative to the fastest single way or plain decoding, for the first 256 tokens and the next
    /// 2,048.
    fn shares(&self, seeds: u64) -> [f64; 2] {
        let methods = self.methods();
        let rate = |way: &Way| {
            let of = |gamma| expected_tokens(way.alpha, gamma) / (way.step * gamma as f64 + flat(gamma + 1) / 10.0);
            (1..=12).map(of).fold(0.0, f64::max)
        };
        let fastest = methods.iter().flatten().max_by(|a, b| rate(a).total_cmp(&rate(b))).expect("a method");
        let (fixed, auto) = (self.paces(&[*fastest], false, seeds), self.paces(&methods.concat(), true, seeds));
        [0, 1].map(|part| auto[part] / fixed[part].min(1.0))
    }
}

/// Models of low to high acceptance in 4 bits; contexts from none to larger than the weights; machines on which 4-bit weights
/// take the time of their bytes, a little more, or more than the target's.
fn scenes(first: f64, told: bool) -> Vec<Scene> {
    let mut all = vec![];
    for weights in [1.0, 0.8, 0.5, 0.2, 0.05] {
        for slow in [1.0, 1.7, 5.0] {
            for (w4, kv4) in [(0.7, 0.95), (0.85, 0.99), (0.95, 0.99)] {
                all.extend([0.0, 0.05, 0.3].map(|loss| Scene { weights, slow, w4, kv4, loss, first, told }));
            }
        }
    }
    all
}

#[test]
fn several_methods_come_close_to_the_fastest() {
    // Expected rejections are wrong for the two texts in three that lose nothing, or much, by reading few pages.
    for (first, told, seeds, bounds) in [
        (1.0, false, 12, [1.03, 1.05, 1.08]),
        (10.0, false, 6, [1.04, 1.09, 1.16]),
        (1.0, true, 12, [1.03, 1.06, 1.15]),
    ] {
        let mut late: Vec<(f64, Scene)> =
            scenes(first, told).into_iter().map(|scene| (scene.shares(seeds)[1], scene)).collect();
        late.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mean = late.iter().map(|scene| scene.0).sum::<f64>() / late.len() as f64;
        let (of_ten, worst) = (late[late.len() * 9 / 10], late[late.len() - 1]);
        let within = mean < bounds[0] && of_ten.0 < bounds[1] && worst.0 < bounds[2];
        assert!(within, "{mean} {of_ten:?} {worst:?}");
    }
}

#[test]
fn several_methods_lose_little_where_none_pays() {
    for (slow, verify) in [(5.0, flat as fn(usize) -> f64), (1.0, linear), (5.0, cliff)] {
        for (w4, kv4) in [(0.0, 0.0), (0.3, 0.3), (0.6, 0.6), (0.9, 0.3)] {
            let scene = Scene { weights: 0.9, slow, w4, kv4, loss: 0.0, first: 1.0, told: true };
            let ways = scene.methods().concat();
            for seed in 0..6 {
                let run = scene.run(&ways, true, verify, seed, [1, 1_500]);
                let share =
                    run.iter().map(|part| part.1).sum::<f64>() / run.iter().map(|part| part.0).sum::<usize>() as f64;
                assert!(share < 1.02, "{share} of plain decoding's time: {scene:?}, seed {seed}");
            }
        }
    }
}

#[test]
fn what_has_no_forecast_is_not_tried() {
    // Without a cache to save, the target's weights take as long as the target.
    let scene = Scene { weights: 1.0, slow: 1.0, w4: 0.9, kv4: 0.99, loss: 0.0, first: 1.0, told: true };
    let ways = scene.methods().concat();
    let known: Vec<forecast::Prior> = ways.iter().map(|way| way.known).collect();
    let kv4 = ways
        .iter()
        .position(|way| way.known.reads == forecast::Reads::TargetWeights)
        .expect("a way with the target's weights");
    let mut policy = Policy::auto(12).with_candidates(ways.len());
    for round in 0..2_000 {
        policy.observe_forecasts(&forecast::forecasts(&vec![true; ways.len()], &known, &policy.measured()), &[]);
        let (gamma, candidate) = (policy.gamma(), policy.candidate());
        assert!(gamma == 0 || candidate != kv4, "round {round}");
        let accepted = (0..gamma).take_while(|&i| WORLD.uniform(round, i as u64) < ways[candidate].alpha).count();
        if gamma > 0 {
            policy.observe_draft(ways[candidate].step * gamma as f64, gamma);
            policy.observe_round(gamma, accepted);
        }
        policy.observe_verify(gamma + 1, flat(gamma + 1) / 10.0);
    }
    assert!(policy.gamma() > 1);
}

/// A batch on a GPU whose drafts read all pages, 16, or 64. Times in plain steps.
struct Documents {
    batch: usize,
    verify: fn(usize) -> f64,
    /// Time of a step, its bytes relative to a plain step's, and acceptance.
    ways: &'static [(f64, f64, f64)],
}

/// Verification in tiles of 128 rows, where tiles that are not full are no faster: 32 sequences after 31,000 tokens.
fn in_tiles(rows: usize) -> f64 {
    match rows {
        ..=128 => 10.0 + 0.005 * (rows as f64 - 32.0),
        129..256 => 12.2,
        256 => 11.6,
        _ => 14.3 + 0.0125 * (rows as f64 - 288.0),
    }
}

/// 8 and 32 sequences, each after 16,384 and 4,096 tokens, and 32 after 31,000, on an H200.
const DOCUMENTS: [Documents; 5] = [
    Documents {
        batch: 8,
        verify: |rows| 10.0 + 0.067 * (rows as f64 - 8.0),
        ways: &[(0.62, 0.5, 0.9), (0.26, 0.11, 0.845), (0.415, 0.275, 0.87)],
    },
    Documents {
        batch: 32,
        verify: |rows| 10.0 + 0.0207 * (rows as f64 - 32.0),
        ways: &[(0.6, 0.53, 0.9), (0.173, 0.09, 0.85), (0.355, 0.28, 0.875)],
    },
    Documents {
        batch: 8,
        verify: |rows| 10.0 + 0.13 * (rows as f64 - 8.0),
        ways: &[(0.6, 0.44, 0.9), (0.535, 0.29, 0.87)],
    },
    Documents {
        batch: 32,
        verify: |rows| 10.0 + 0.039 * (rows as f64 - 32.0),
        ways: &[(0.58, 0.52, 0.9), (0.437, 0.31, 0.86)],
    },
    Documents { batch: 32, verify: in_tiles, ways: &[(0.4, 0.5, 0.93), (0.11, 0.09, 0.92), (0.23, 0.25, 0.925)] },
];

impl Documents {
    /// Time per token of 256 tokens of each sequence, the mean of `seeds` texts.
    fn pace(&self, policy: &Policy, ways: &[Way], slow_first: f64, seeds: u64) -> f64 {
        let run = |seed| {
            let world = World { seed, batch: self.batch, verify: self.verify, ..WORLD };
            let [(tokens, seconds), _] = choose_among(&world, policy.clone(), ways, true, slow_first, [256, 256]);
            seconds / tokens as f64
        };
        (0..seeds).map(run).sum::<f64>() / seeds as f64
    }
}

#[test]
fn batches_of_documents_come_close_to_the_best_pair() {
    for documents in &DOCUMENTS {
        let way = |&(step, bytes, alpha)| Way {
            step,
            alpha,
            known: forecast::Prior { bytes, alpha: 0.95, rejections: 1.0, reads: forecast::Reads::DraftWeights },
        };
        let ways: Vec<Way> = documents.ways.iter().map(way).collect();
        for (slow_first, bound) in [(1.0, 1.03), (4.0, 1.05)] {
            let fixed = |way: &Way| {
                let of = |gamma| documents.pace(&Policy::fixed(gamma), &[*way], slow_first, 4);
                (0..=8).map(of).fold(f64::INFINITY, f64::min)
            };
            let best = ways.iter().map(fixed).fold(f64::INFINITY, f64::min);
            let auto = documents.pace(&Policy::auto(12).with_candidates(ways.len()), &ways, slow_first, 12);
            let share = auto / best;
            assert!(
                share < bound,
                "batch {}, first draft {slow_first}: {share} of the best pair's time",
                documents.batch
            );
        }
    }
}
