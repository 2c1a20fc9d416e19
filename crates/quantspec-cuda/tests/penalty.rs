//! Penalties on the device compared with quantspec-core, bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod gpu;

use gpu::{Random, device, poisoned, run};
use quantspec_core::grammar::{self, words};
use quantspec_core::penalty::{History, Penalties, apply};
use quantspec_cuda::args;
use quantspec_cuda::device::{Buffer, Device};
use std::sync::Arc;

const WINDOW: usize = 8;
const CAPACITY: usize = 4000;
/// Tokens of a commit: `COMMIT_TOKENS` in kernels/penalty.cu, whose layout this test states independently.
const MORE: usize = 30;

/// Device buffers of some slots' penalties.
struct Stage {
    device: Arc<Device>,
    histories: Buffer,
    texts: Buffer,
    counts: Buffer,
    vocab: usize,
}

impl Stage {
    fn new(device: &Arc<Device>, slots: usize, vocab: usize) -> Stage {
        Stage {
            device: device.clone(),
            histories: device.zeroed(slots * 32).unwrap(),
            texts: poisoned(device, slots * CAPACITY * 4),
            counts: device.zeroed(slots * vocab * 4).unwrap(),
            vocab,
        }
    }

    /// Commits the last `more` tokens of the histories of slots; `None` has no penalties.
    fn commit(&self, histories: &[Option<&History>], more: usize) {
        let mut commits: Vec<u32> = Vec::new();
        for (slot, history) in histories.iter().enumerate() {
            let mut words = vec![slot as u32];
            if let Some(history) = history {
                let (text, p) = (history.text(), history.penalties());
                words.extend([more as u32, 1, p.no_repeat_ngram as u32]);
                words.extend([p.repetition, p.frequency, p.presence].map(f32::to_bits));
                words.extend([text.len() as u32, history.prompt_tokens() as u32, 0]);
                let new = &text[text.len() - more..];
                match more <= MORE {
                    true => words.extend(new),
                    false => self.texts.write((slot * CAPACITY + text.len() - more) * 4, new).unwrap(),
                }
            }
            words.resize(40, 0);
            commits.extend(words);
        }
        let commits = self.device.copied(&commits).unwrap();
        let arguments = args![&commits, &self.histories, &self.texts, CAPACITY, &self.counts, self.vocab];
        run(&self.device, "penalty_commit", [histories.len(), 1, 1], 256, 0, &arguments);
    }

    /// Penalised logits of rows `[slot, offset, position, 0]`.
    fn apply(&self, rows: &[[i32; 4]], windows: &[i32], logits: &[f32]) -> Vec<f32> {
        let (count, rows) = (rows.len(), self.device.copied(&rows.concat()).unwrap());
        let (windows, logits) = (self.device.copied(windows).unwrap(), self.device.copied(logits).unwrap());
        let arguments = args![&rows, &self.histories, &self.counts, &windows, WINDOW, &logits, self.vocab];
        run(&self.device, "penalty_apply", [self.vocab.div_ceil(1024), count, 1], 256, 0, &arguments);
        let arguments = args![&rows, &self.histories, &self.texts, CAPACITY, &windows, WINDOW, &logits, self.vocab];
        // Fewer blocks than the text needs at one position per thread.
        run(&self.device, "penalty_forbid", [3, count, 1], 256, 0, &arguments);
        logits.read(0, count * self.vocab).unwrap()
    }
}

#[test]
fn penalties_equal_core() {
    let Some(device) = device() else { return };
    let mut random = Random(11);
    for (vocab, spread) in [(1, 1), (257, 9), (5000, 40), (128_256, 128_256)] {
        let settings =
            [(1.3, 0.0, 0.0, 0), (1.0, 0.5, -0.25, 0), (1.0, 0.0, 0.0, 2), (0.7, -0.1, 0.2, 3), (1.1, 0.3, 0.0, 100)];
        // The last slot has no penalties.
        let slots = settings.len() + 1;
        let stage = Stage::new(&device, slots, vocab);
        let tokens = |random: &mut Random, n: usize| -> Vec<u32> {
            (0..n).map(|_| (random.next() % spread as u64) as u32 * (vocab / spread) as u32).collect()
        };
        let prompt = tokens(&mut random, 3000);
        let of = |&(repetition, frequency, presence, ngram): &(f32, f32, f32, usize)| {
            Some(History::new(&prompt, Penalties::new(repetition, frequency, presence, ngram).unwrap(), 0))
        };
        let mut histories: Vec<Option<History>> = settings.iter().map(of).collect();
        histories.push(None);
        let commit = |histories: &[Option<History>], more| {
            stage.commit(&histories.iter().map(Option::as_ref).collect::<Vec<_>>(), more);
        };
        commit(&histories, prompt.len());
        for more in [0, 1, 5, MORE, MORE + 1, 200] {
            let new = tokens(&mut random, more);
            histories.iter_mut().flatten().for_each(|history| history.extend(&new));
            if more > 0 {
                commit(&histories, more);
            }
            // Every slot's window: the last emitted token, and seven drafted ones; a row sees those before it.
            let drafted = tokens(&mut random, slots * (WINDOW - 1));
            let windows: Vec<i32> = drafted
                .chunks(WINDOW - 1)
                .flat_map(|own| std::iter::once(-1).chain(own.iter().map(|&t| t as i32)))
                .collect();
            let rows: Vec<[i32; 4]> = (0..slots as i32)
                .flat_map(|slot| [0, 1, 4, 7].map(|offset| [slot, offset, 3000 + offset, 0]))
                .collect();
            let logits: Vec<f32> = (0..rows.len() * vocab).map(|_| random.normal() * 4.0).collect();
            let got = stage.apply(&rows, &windows, &logits);
            for (row, &[slot, offset, ..]) in rows.iter().enumerate() {
                let slot = slot as usize;
                let mut want = logits[row * vocab..(row + 1) * vocab].to_vec();
                if let Some(history) = &histories[slot] {
                    apply(&mut want, history, &drafted[slot * (WINDOW - 1)..][..offset as usize]);
                    // Frequency and presence concern the answer alone, which is empty at first.
                    let answered = history.text().len() > history.prompt_tokens() || offset > 0;
                    let changed = want != logits[row * vocab..(row + 1) * vocab];
                    assert!(changed || vocab == 1 || settings[slot].3 > 3 || spread > 100 || !answered);
                }
                let got = &got[row * vocab..(row + 1) * vocab];
                let differs = (0..vocab).find(|&id| got[id].to_bits() != want[id].to_bits());
                assert_eq!(differs, None, "slot {slot}, offset {offset}, vocabulary of {vocab}, {more} more tokens");
            }
        }
    }
}

#[test]
fn masks_equal_core() {
    let Some(device) = device() else { return };
    let mut random = Random(11);
    for (vocab, rows) in [(1, 1), (33, 3), (1024, 1), (5000, 17), (151_936, 5)] {
        let words = words(vocab);
        let masks: Vec<u32> = (0..rows * words).map(|_| random.next() as u32).collect();
        let logits: Vec<f32> = (0..rows * vocab).map(|_| random.normal()).collect();
        let (on_device, at) = (device.copied(&logits).unwrap(), device.copied(&masks).unwrap());
        let arguments = args![&at, words, &on_device, vocab];
        run(&device, "penalty_mask", [vocab.div_ceil(1024), rows, 1], 256, 0, &arguments);
        let got = on_device.read::<f32>(0, rows * vocab).unwrap();
        for (row, got) in got.chunks(vocab).enumerate() {
            let mut want = logits[row * vocab..][..vocab].to_vec();
            grammar::apply(&mut want, &masks[row * words..][..words]);
            assert!(
                got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()),
                "row {row} of {rows}, {vocab} tokens"
            );
        }
    }
}

#[test]
fn a_slot_without_penalties_is_not_changed() {
    let Some(device) = device() else { return };
    let stage = Stage::new(&device, 1, 100);
    let history = History::new(&[1, 2, 3, 1, 2], Penalties::new(2.0, 0.0, 0.0, 2).unwrap(), 0);
    let logits: Vec<f32> = (0..100).map(|i| i as f32).collect();
    stage.commit(&[Some(&history)], 5);
    let rows = [[0, 0, 5, 0]];
    assert_ne!(stage.apply(&rows, &[0; WINDOW], &logits), logits);
    stage.commit(&[None], 0);
    assert_eq!(stage.apply(&rows, &[0; WINDOW], &logits), logits);
}
