//! Rejection over consecutive rounds. After a rejected token, later positions are drafted again, and the text must still follow
//! the target.

use quantspec_core::penalty::{History, Penalties, history, penalised};
use quantspec_core::sample::{Accept, Sampler, warp};
use quantspec_core::verify::{DraftDistribution, Judge};

const VOCAB: usize = 4;

/// Tokens of a text after its first one, which is 0.
const LENGTH: usize = 4;

/// Number of different texts.
const TEXTS: usize = VOCAB.pow(LENGTH as u32);

/// Logits after a token.
type Chain = [[f32; VOCAB]; VOCAB];

const TARGET: Chain = [[0.5, 0.4, -0.4, -0.2], [-0.3, 0.2, 0.6, -0.5], [0.4, -0.8, 0.1, 0.3], [0.0, 0.3, -0.6, 0.5]];
/// Close enough to the target that drafts are accepted, and far enough that they are rejected, for two tokens each that the
/// target prefers.
const DRAFT: Chain = [[0.0, -0.2, 0.3, 0.2], [0.3, -0.2, 0.0, 0.4], [-0.3, 0.0, 0.6, -0.3], [0.6, -0.3, 0.1, -0.1]];

fn sampler(seed: u64) -> Sampler {
    Sampler { temperature: 1.0, seed, accept: Accept::Rejection, ..Sampler::greedy() }
}

/// Every kind of penalty.
fn penalties() -> Penalties {
    Penalties::new(1.5, 0.4, -0.3, 3).expect("penalties")
}

/// Probability of each text of the chain, indexed by the text's tokens as digits in base vocabulary size.
fn law(chain: &Chain, penalties: Penalties) -> Vec<f64> {
    let probability = |text: usize| {
        let (mut last, mut product, mut before) = (0, 1.0, History::new(&[0], penalties, 0));
        for token in digits(text) {
            let logits = penalised(&chain[last], Some(&before), &[]);
            product *= f64::from(warp(&logits, &sampler(0))[token]);
            before.extend(&[token as u32]);
            last = token;
        }
        product
    };
    (0..TEXTS).map(probability).collect()
}

fn digits(text: usize) -> impl Iterator<Item = usize> {
    (0..LENGTH).rev().map(move |place| text / VOCAB.pow(place as u32) % VOCAB)
}

/// Pearson's statistic divided by the 1 − 10⁻⁵ quantile of its χ² distribution (Wilson and Hilferty). Above 1 the counts do
/// not follow `law`.
fn misfit(counts: &[f64], law: &[f64]) -> f64 {
    let possible: Vec<(f64, f64)> = counts.iter().copied().zip(law.iter().copied()).filter(|(_, p)| *p > 0.0).collect();
    let (total, freedom) = (counts.iter().sum::<f64>(), possible.len() as f64 - 1.0);
    if possible.iter().map(|(n, _)| n).sum::<f64>() < total {
        // A text that the law forbids.
        return f64::INFINITY;
    }
    let chi: f64 = possible.iter().map(|(n, p)| (n - p * total).powi(2) / (p * total)).sum();
    let spread = 2.0 / (9.0 * freedom);
    chi / (freedom * (1.0 - spread + 4.265 * spread.sqrt()).powi(3))
}

/// Counts of each text over all seeds, in rounds of γ as an engine runs them, and the number of positions drafted twice. A draft
/// ends early at token `last`.
fn texts(gamma: usize, last: Option<u32>, seeds: u64, penalties: Penalties) -> (Vec<f64>, usize) {
    let (mut counts, mut again) = (vec![0.0; TEXTS], 0);
    let mut judge = Judge::new();
    for seed in 0..seeds {
        let sampler = Sampler { penalties, ..sampler(seed) };
        let mut committed = history(&[0], sampler.penalties, 0);
        let (mut text, mut reached) = (vec![0u32], 0usize);
        while text.len() <= LENGTH {
            // A token's position is its index in the text.
            let first = text.len();
            let mut window = vec![text[first - 1]];
            for offset in 0..gamma {
                let logits = penalised(&DRAFT[window[offset] as usize], committed.as_ref(), &window[1..]);
                let token = judge.propose(0, offset, first + offset, &logits, &sampler);
                window.push(token);
                if Some(token) == last {
                    break;
                }
            }
            again += (reached + 1).saturating_sub(first);
            reached = reached.max(first + window.len() - 2);
            let row =
                |i: usize| penalised(&TARGET[window[i] as usize], committed.as_ref(), &window[1..=i]).into_owned();
            let rows: Vec<Vec<f32>> = (0..window.len()).map(row).collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let verdict =
                judge.judge(0, &window[1..], DraftDistribution::Kept, &rows, &sampler, first).expect("verdict");
            text.extend(&window[1..=verdict.accepted]);
            text.push(verdict.token);
            committed.iter_mut().for_each(|committed| committed.extend(&text[first..]));
        }
        counts[text[1..=LENGTH].iter().fold(0, |number, token| VOCAB * number + *token as usize)] += 1.0;
    }
    (counts, again)
}

#[test]
fn rounds_that_draft_again_keep_the_distribution_of_the_text() {
    for (gamma, last) in [(1, None), (2, None), (4, None), (4, Some(1))] {
        for penalties in [Penalties::default(), penalties()] {
            let (target, draft) = (law(&TARGET, penalties), law(&DRAFT, penalties));
            let (counts, again) = texts(gamma, last, 60_000, penalties);
            assert!((again > 10_000) == (gamma > 1), "{again} positions were drafted again with gamma {gamma}");
            let found = misfit(&counts, &target);
            assert!(found < 1.0, "gamma {gamma}, drafts that end at {last:?}: {found}");
            // The statistic must detect the draft's distribution as different.
            assert!(misfit(&counts, &draft) > 3.0);
        }
    }
}
