//! Choices, cuts and verdicts of the device compared with quantspec-core.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{Random, device, poisoned, run};
use quantspec_core::noise::Stream;
use quantspec_core::sample::{Accept, Sampler, argmax, choose, choose_with_margin};
use quantspec_core::verify::{DraftDistribution, Judge};
use quantspec_cuda::args;
use quantspec_cuda::device::{Buffer, Device};
use std::sync::Arc;

/// `sample_choose`'s flag for its rows: drafts, or the target.
const DRAFTS: i32 = 1;
const TARGET: i32 = 0;

/// Bytes of a sampler as kernels/sample.cu declares it.
fn packed(sampler: &Sampler) -> Vec<u32> {
    let accept = match sampler.accept {
        Accept::Greedy => 0,
        Accept::Replay => 1,
        Accept::Rejection => 2,
    };
    vec![
        sampler.temperature.to_bits(),
        sampler.top_p.to_bits(),
        sampler.min_p.to_bits(),
        sampler.top_k as u32,
        sampler.seed as u32,
        (sampler.seed >> 32) as u32,
        sampler.sequence as u32,
        (sampler.sequence >> 32) as u32,
        accept,
        0,
        0,
        0,
    ]
}

/// Everything the sampling kernels work on.
struct Stage {
    device: Arc<Device>,
    samplers: Buffer,
    windows: Buffer,
    q_logits: Buffer,
    q_cuts: Buffer,
    races: Buffer,
    arrived: Buffer,
    margin: Buffer,
    flag: Buffer,
    vocab: usize,
    slots: usize,
}

const WINDOW: usize = 8;
const CUT_BYTES: usize = 24;

impl Stage {
    fn new(device: &Arc<Device>, samplers: &[Sampler], vocab: usize) -> Stage {
        let slots = samplers.len();
        Stage {
            device: device.clone(),
            samplers: device.copied(&samplers.iter().flat_map(packed).collect::<Vec<_>>()).unwrap(),
            windows: device.zeroed(slots * WINDOW * 4).unwrap(),
            q_logits: poisoned(device, slots * WINDOW * vocab * 4),
            q_cuts: poisoned(device, slots * WINDOW * CUT_BYTES),
            races: poisoned(device, 64 * 16 * vocab.div_ceil(2048)),
            arrived: device.zeroed(64 * 4).unwrap(),
            margin: device.zeroed(4).unwrap(),
            flag: device.zeroed(4).unwrap(),
            vocab,
            slots,
        }
    }

    /// Chooses for rows `[slot, offset, position, 0]`; returns the choices and the cuts.
    fn choose(&self, rows: &[[i32; 4]], logits: &[f32], drafts: i32) -> (Vec<i32>, Buffer, Buffer) {
        let count = rows.len();
        let (rows, logits) = (self.device.copied(&rows.concat()).unwrap(), self.device.copied(logits).unwrap());
        let (cuts, choices) = (poisoned(&self.device, count * CUT_BYTES), poisoned(&self.device, count * 4));
        run(
            &self.device,
            "sample_cut",
            [count, 1, 1],
            1024,
            0,
            &args![&rows, &self.samplers, &logits, &cuts, self.vocab, &self.flag],
        );
        let arguments = args![
            &rows,
            &self.samplers,
            &logits,
            &cuts,
            self.vocab,
            drafts,
            &choices,
            &self.windows,
            WINDOW,
            &self.q_logits,
            &self.q_cuts,
            WINDOW,
            &self.races,
            &self.arrived,
            &self.margin,
            &self.flag
        ];
        run(&self.device, "sample_choose", [self.vocab.div_ceil(2048), count, 1], 256, 0, &arguments);
        assert!(self.arrived.read::<u32>(0, 64).unwrap().iter().all(|&x| x == 0), "scratch left dirty");
        (choices.read(0, count).unwrap(), logits, cuts)
    }

    fn flag(&self) -> u32 {
        self.flag.read::<u32>(0, 1).unwrap()[0]
    }

    /// Logit margin of row 0 in the last draft choice.
    fn margin(&self) -> f32 {
        self.margin.read::<f32>(0, 1).unwrap()[0]
    }

    fn windows(&self) -> Vec<i32> {
        self.windows.read(0, self.slots * WINDOW).unwrap()
    }
}

/// Logits like a model's: a few likely tokens over a broad floor, with exact ties.
fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..vocab).map(|_| random.normal() * 2.0).collect();
    for _ in 0..12 {
        let at = random.below(vocab);
        x[at] = 6.0 + random.normal() * 2.0;
    }
    for _ in 0..vocab / 50 {
        let (a, b) = (random.below(vocab), random.below(vocab));
        x[a] = x[b];
    }
    x
}

fn sampler(temperature: f32, top_k: usize, top_p: f32, min_p: f32, accept: Accept) -> Sampler {
    Sampler {
        temperature,
        top_k,
        top_p,
        min_p,
        seed: 0x1234_5678_9abc_def0,
        sequence: 0x3_0000_0007,
        accept,
        ..Sampler::greedy()
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let Some(device) = device() else { return };
    let mut random = Random(1);
    for vocab in [1, 3, 100, 8192, 8193, 32000, 128_257] {
        let stage = Stage::new(&device, &[Sampler::greedy(), Sampler::greedy()], vocab);
        let rows: Vec<[i32; 4]> = (0..7).map(|i| [i % 2, i / 2, 10 + i, 0]).collect();
        let mut all: Vec<f32> = (0..rows.len()).flat_map(|_| logits(&mut random, vocab)).collect();
        // A tie between distant tokens, both zeros, and a row in which all tokens but one are masked.
        if vocab > 50 {
            let most = all[..vocab].iter().copied().fold(f32::MIN, f32::max) + 1.0;
            (all[vocab - 1], all[vocab / 2], all[37]) = (most, most, most);
            all[vocab..2 * vocab].fill(-0.0);
            all[vocab + 40] = 0.0;
            all[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
            all[3 * vocab - 2] = -1e30;
        }
        let (choices, ..) = stage.choose(&rows, &all, DRAFTS);
        let windows = stage.windows();
        for (row, &[slot, offset, ..]) in rows.iter().enumerate() {
            let want = argmax(&all[row * vocab..(row + 1) * vocab]);
            assert_eq!(choices[row], want as i32, "row {row} of {vocab}");
            assert_eq!(windows[slot as usize * WINDOW + offset as usize + 1], want as i32);
        }
        // Margins of row 0 of many, and of every row alone: a tie, zeros of both signs, a row with one unmasked token, a
        // vocabulary of one.
        let (greedy, margin) = (Sampler::greedy(), stage.margin());
        let margins = rows.iter().enumerate().map(|(row, place)| {
            let logits = &all[row * vocab..(row + 1) * vocab];
            stage.choose(&[*place], logits, DRAFTS);
            (stage.margin(), choose_with_margin(logits, &greedy, place[2] as usize + 1, Stream::Sample).1)
        });
        let margins: Vec<(f32, f32)> = margins.collect();
        assert!(margins.iter().all(|(got, want)| got == want), "margins of {vocab}: {margins:?}");
        assert!(margin == margins[0].0 && (vocab <= 50 || margins[0].0 == 0.0 && margins[2].0 == f32::INFINITY));
        stage.choose(&rows[1..2], &all[vocab..2 * vocab], TARGET);
        assert!(stage.margin() == margins[rows.len() - 1].0, "a judgement wrote a margin");
        assert_eq!(stage.flag(), 0);
    }
}

#[test]
fn sampled_choices_equal_core() {
    let Some(device) = device() else { return };
    let mut random = Random(2);
    for vocab in [257, 32000, 128_256, 262_208] {
        let samplers = [
            sampler(1.0, 0, 1.0, 0.0, Accept::Replay),
            sampler(0.7, 40, 1.0, 0.0, Accept::Replay),
            sampler(0.8, 0, 0.9, 0.0, Accept::Replay),
            sampler(1.3, 0, 1.0, 0.05, Accept::Replay),
            sampler(0.9, 50, 0.95, 0.02, Accept::Replay),
            sampler(2.0, 0, 0.999, 0.0, Accept::Replay),
            sampler(0.05, 1, 1.0, 0.0, Accept::Replay),
            sampler(1e-6, 0, 1.0, 0.0, Accept::Replay),
            sampler(30.0, 20_000, 0.6, 0.0, Accept::Replay),
            Sampler::greedy(),
            sampler(1.0, 0, 0.9, 0.0, Accept::Rejection),
        ];
        let stage = Stage::new(&device, &samplers, vocab);
        for trial in 0..3 {
            let rows: Vec<[i32; 4]> =
                (0..samplers.len() as i32).map(|i| [i, i % 7, 1000 * trial + 31 * i, 0]).collect();
            let all: Vec<f32> = (0..rows.len()).flat_map(|_| logits(&mut random, vocab)).collect();
            for drafts in [DRAFTS, TARGET] {
                let (choices, ..) = stage.choose(&rows, &all, drafts);
                for (row, &[slot, offset, position, _]) in rows.iter().enumerate() {
                    let s = &samplers[slot as usize];
                    let stream = if drafts == DRAFTS { s.draft_stream(offset as usize) } else { Stream::Sample };
                    let want = choose(&all[row * vocab..(row + 1) * vocab], s, position as usize + 1, stream);
                    assert_eq!(choices[row], want as i32, "row {row} of {vocab}, drafts {drafts}, {s:?}");
                }
            }
            for (row, place) in rows.iter().enumerate() {
                let s = &samplers[place[0] as usize];
                let logits = &all[row * vocab..(row + 1) * vocab];
                stage.choose(&[*place], logits, DRAFTS);
                let (_, want) = choose_with_margin(logits, s, place[2] as usize + 1, s.draft_stream(place[1] as usize));
                assert!(
                    (stage.margin() - want).abs() <= 1e-4 * (1.0 + want),
                    "{} {want}: {vocab}, {s:?}",
                    stage.margin()
                );
            }
        }
        assert_eq!(stage.flag(), 0);
    }
}

/// 2^18 equal logits: their masses are in one bin of the histogram, which a few other tokens follow.
#[test]
fn one_bin_has_room_for_a_large_vocabulary() {
    let Some(device) = device() else { return };
    const VOCAB: usize = 262_208;
    let s = sampler(1.0, 0, 0.6, 0.0, Accept::Replay);
    let stage = Stage::new(&device, std::slice::from_ref(&s), VOCAB);
    let row: Vec<f32> = (0..VOCAB).map(|id| if id % 4096 == 7 { -1.0 } else { 0.0 }).collect();
    for position in 0..12 {
        let (choices, ..) = stage.choose(&[[0, 0, position, 0]], &row, TARGET);
        assert_eq!(choices[0], choose(&row, &s, position as usize + 1, Stream::Sample) as i32, "at {position}");
    }
}

#[test]
fn rows_do_not_depend_on_each_other() {
    let Some(device) = device() else { return };
    let (mut random, vocab) = (Random(3), 5000);
    let samplers = [sampler(1.0, 0, 0.8, 0.0, Accept::Replay), Sampler::greedy()];
    let stage = Stage::new(&device, &samplers, vocab);
    let rows: Vec<[i32; 4]> = (0..9).map(|i| [i % 2, i / 2, 100 + i, 0]).collect();
    let all: Vec<f32> = (0..rows.len()).flat_map(|_| logits(&mut random, vocab)).collect();
    let (together, _, cuts) = stage.choose(&rows, &all, TARGET);
    let cuts = cuts.read::<u8>(0, rows.len() * CUT_BYTES).unwrap();
    for (row, place) in rows.iter().enumerate() {
        let (alone, _, cut) = stage.choose(&[*place], &all[row * vocab..(row + 1) * vocab], TARGET);
        assert_eq!(alone[0], together[row]);
        if place[0] == 0 {
            assert!(
                cut.read::<u8>(0, CUT_BYTES).unwrap() == cuts[row * CUT_BYTES..(row + 1) * CUT_BYTES],
                "cut of row {row}"
            );
        }
    }
}

#[test]
#[allow(clippy::needless_range_loop, reason = "i is the offset of a drafted token, and indexes more than one thing")]
fn verdicts_equal_core() {
    let Some(device) = device() else { return };
    let (mut random, vocab, gamma) = (Random(4), 3000, 5);
    let samplers = [
        Sampler::greedy(),
        sampler(1.0, 0, 1.0, 0.0, Accept::Replay),
        sampler(1.0, 0, 1.0, 0.0, Accept::Rejection),
        sampler(0.8, 100, 0.95, 0.0, Accept::Rejection),
        // For the next two samplers, nothing was drawn from a distribution.
        sampler(1.0, 0, 1.0, 0.0, Accept::Rejection),
        sampler(0.6, 0, 1.0, 0.02, Accept::Rejection),
    ];
    let q = |slot: usize| if slot < 4 { DraftDistribution::Kept } else { DraftDistribution::OneHot };
    let mut accepted = [0; 6];
    for trial in 0..40usize {
        let stage = Stage::new(&device, &samplers, vocab);
        let committed = 1000 + trial * 10;
        // One turn drafts nothing at times.
        let gammas = [gamma, gamma, gamma, if trial % 8 == 0 { 0 } else { gamma }, gamma, gamma];
        let mut draft_logits = vec![Vec::new(); samplers.len()];
        let mut target_rows: Vec<[i32; 4]> = Vec::new();
        let mut target = Vec::new();
        let mut turns: Vec<i32> = Vec::new();
        for (slot, &gamma) in gammas.iter().enumerate() {
            let one_hot = i32::from(q(slot) == DraftDistribution::OneHot);
            turns.extend([slot as i32, target_rows.len() as i32, gamma as i32, committed as i32 + 1, one_hot]);
            for i in 0..=gamma {
                let p = logits(&mut random, vocab);
                // The draft is the target plus noise, small in most trials.
                let blur = if (trial + i) % 3 == 0 { 1.5 } else { 0.05 };
                draft_logits[slot].push(p.iter().map(|x| x + random.normal() * blur).collect::<Vec<f32>>());
                target_rows.push([slot as i32, i as i32, (committed + i) as i32, 0]);
                target.extend(p);
            }
        }
        for i in 0..gamma {
            let slots: Vec<usize> = (0..samplers.len()).filter(|&slot| gammas[slot] > i).collect();
            let rows: Vec<[i32; 4]> =
                slots.iter().map(|&slot| [slot as i32, i as i32, (committed + i) as i32, 0]).collect();
            let all: Vec<f32> = slots.iter().flat_map(|&slot| draft_logits[slot][i].clone()).collect();
            stage.choose(&rows, &all, DRAFTS);
        }
        let windows = stage.windows();
        let (choices, logits_on, cuts) = stage.choose(&target_rows, &target, TARGET);
        let choices_on = device.copied(&choices).unwrap();
        let turns_on = device.copied(&turns).unwrap();
        let verdicts = poisoned(&device, samplers.len() * 8);
        let arguments = args![
            &turns_on,
            &stage.samplers,
            &choices_on,
            &stage.windows,
            WINDOW,
            &logits_on,
            &cuts,
            vocab,
            &stage.q_logits,
            &stage.q_cuts,
            WINDOW,
            &verdicts
        ];
        run(&device, "judge", [samplers.len(), 1, 1], 1024, 0, &arguments);
        let got = verdicts.read::<i32>(0, samplers.len() * 2).unwrap();
        for (slot, s) in samplers.iter().enumerate() {
            let gamma = gammas[slot];
            let drafted: Vec<u32> = (0..gamma).map(|i| windows[slot * WINDOW + i + 1] as u32).collect();
            let first = turns[slot * 5 + 1] as usize;
            let row = |i: usize| &target[(first + i) * vocab..(first + i + 1) * vocab];
            // Core must draft the same tokens; it keeps the distributions for rejection.
            let mut judge = Judge::new();
            let by_core = |i: usize| judge.propose(slot, i, committed + 1 + i, &draft_logits[slot][i], s);
            assert_eq!((0..gamma).map(by_core).collect::<Vec<u32>>(), drafted, "trial {trial}, {s:?}");
            let rows: Vec<&[f32]> = (0..=gamma).map(row).collect();
            let verdict = judge.judge(slot, &drafted, q(slot), &rows, s, committed + 1).unwrap();
            assert_eq!(
                (got[2 * slot], got[2 * slot + 1]),
                (verdict.accepted as i32, verdict.token as i32),
                "trial {trial}, {s:?}"
            );
            accepted[slot] += verdict.accepted;
        }
        assert_eq!(stage.flag(), 0);
    }
    // The cases must cover both acceptance and rejection. Known tokens are rarely accepted, as no draft chose them.
    assert!(accepted.iter().all(|&n| n > 5 && n < 40 * gamma), "{accepted:?}");
}

#[test]
fn unusable_logits_raise_the_flag() {
    let Some(device) = device() else { return };
    let vocab = 9000;
    let samplers = [Sampler::greedy(), sampler(1.0, 10, 0.9, 0.1, Accept::Replay)];
    for bad in [f32::NAN, f32::INFINITY] {
        for slot in 0..2 {
            let stage = Stage::new(&device, &samplers, vocab);
            let mut x = logits(&mut Random(5), vocab);
            x[8500] = bad;
            stage.choose(&[[slot, 0, 5, 0]], &x, TARGET);
            assert_eq!(stage.flag(), 2, "{bad} with sampler {slot}");
        }
    }
    for slot in 0..2 {
        let stage = Stage::new(&device, &samplers, vocab);
        let (choices, ..) = stage.choose(&[[slot, 0, 5, 0]], &vec![f32::NEG_INFINITY; vocab], TARGET);
        assert_eq!((stage.flag(), choices[0]), (8, 0));
        // A draft that computed no number has no margin: the host ends it there.
        stage.margin.write(0, &[f32::INFINITY]).unwrap();
        stage.choose(&[[slot, 0, 5, 0]], &vec![f32::NAN; vocab], DRAFTS);
        let margin = stage.margin();
        assert!(margin.is_nan() || margin == 0.0, "{margin} with sampler {slot}");
    }
}
