//! Drafters: sources of a round's tokens before the target verifies them.
//!
//! A drafter proposes tokens; the engine verifies, commits and keeps the statistics. So a drafter affects the speed of a
//! text, never its tokens (greedy and replay) or its distribution (rejection). To add one, write a file with a [`Drafter`]
//! and a line of [`METHODS`].

mod auto;
mod copying;
mod levels;
mod model;
mod ngram;
mod self_quantised;

pub use auto::Auto;
pub use copying::Copying;
pub use model::{CATCH_UP_ROWS, DraftModel};
pub use ngram::Ngram;
pub use self_quantised::SelfQuantised;

use crate::backend::{Backend, DraftConfig, Memory, TokenSampler, Turn};
use crate::forward::{self, Guess};
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, Pages, View, Weights};
use quantspec_core::forecast::{Prior, Reads};
use quantspec_core::plan::{full_page_bytes, lower_page_bytes, upper_page_bytes};
use std::fmt::Debug;

/// Proposes tokens for the sequences of an engine. A slot names a sequence of the target; a drafter with its own cache maps
/// slots to its sequences.
///
/// The engine calls `prefill` once per answer, then `propose` and `commit` for each round that drafts (`commit` alone for
/// others), and `close` at the end. If the method changes during an answer, `prefill` has the text so far as its prompt.
pub trait Drafter: Debug + Send {
    /// Data that the target's backend must keep.
    fn needs(&self) -> Needs;

    /// True if proposed tokens have logit margins, by which the policy may end the draft of a single sequence early.
    fn margins(&self) -> bool {
        false
    }

    /// Tokens, at most `most`, of the sequence's own text to copy instead of drafting in the next round of this slot;
    /// [`Turn::copied`] is then set for [`Drafter::propose`]. `break_even(γ)` is the number of tokens a round of γ copied ones
    /// must emit to be as fast as other rounds; `None` if costs of a single sequence are unknown.
    fn copies(&self, _slot: usize, _most: usize, _break_even: &dyn Fn(usize) -> Option<f64>) -> usize {
        0
    }

    /// Number of ways to draft, at least one. The policy compares their cost and yield.
    fn candidates(&self) -> usize {
        1
    }

    /// Whether each candidate can draft in one round and is worth measuring. Candidate 0 always is.
    fn usable(&self, _outlook: &Outlook) -> Vec<bool> {
        vec![true; self.candidates()]
    }

    /// What is known of each candidate before it drafts, for one round. Empty if nothing is: then all usable ones are tried.
    fn priors(&self, _outlook: &Outlook) -> Vec<Prior> {
        Vec::new()
    }

    /// Name of a candidate's method, if the drafter has several.
    fn method(&self, _candidate: usize) -> Option<&'static str> {
        None
    }

    /// Continues a slot's prompt in the drafter's own network, if it has one, for about `most_work`: rows of a layer times the
    /// bytes of its weights. Returns true at the prompt's end, and from then on. Rounds of other slots may run before the next call, which has the
    /// same prompt. `progress` is called after each block of rows.
    ///
    /// # Errors
    /// Those of the drafter's own network.
    fn read_prompt(
        &mut self,
        _slot: usize,
        _prompt: &[u32],
        _most_work: f64,
        _progress: &mut dyn FnMut(),
    ) -> Result<bool> {
        Ok(true)
    }

    /// Begins a sequence with its prompt, which is read if [`Drafter::read_prompt`] has not, and the first token of the answer.
    /// Replaces the slot's previous state.
    ///
    /// # Errors
    /// Those of the drafter's own network.
    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()>;

    /// Proposes up to `turn.gamma` tokens for every turn, except those with [`Turn::copied`], which have their tokens. Sets
    /// `turn.gamma` to their number and `turn.q` to their distribution.
    ///
    /// The tokens are written to the slot's window: by the drafter through [`Target::set_proposed`], or by [`Target::draft`], at
    /// the latest when the target verifies. `candidate` is one of the ways to draft.
    ///
    /// # Errors
    /// Those of the target's backend, and of the drafter's own network. Non-finite values of a draft end the draft instead.
    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], candidate: usize) -> Result<Proposed>;

    /// Ends a round: the sequence emitted `tokens`, accepted ones and the target's own.
    ///
    /// # Errors
    /// Those of the drafter's own network.
    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()>;

    /// Removes a sequence. Slots that were never begun are allowed.
    fn close(&mut self, slot: usize);

    /// Bytes of the drafter's own network.
    fn memory(&self) -> Memory {
        Memory::default()
    }
}

/// Data that a drafter needs from the target's backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// A view of the target's cache, whose planes must be kept.
    pub view: Option<View>,
    /// The 4-bit draft weights.
    pub draft_weights: bool,
    /// Room for the distribution of every drafted token, if acceptance is by rejection.
    pub distributions: bool,
    /// The attention that a prompt's end pays to its pages.
    pub page_masses: bool,
}

/// Data that the next round may read.
#[derive(Clone, Copy, Debug)]
pub struct Outlook<'a> {
    /// KV heads, over all layers.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// The target's view of the cache.
    pub target: View,
    /// Bytes of the target's weights.
    pub weights_bytes: usize,
    /// [`Backend::draft_read_bytes`].
    pub draft_read_bytes: usize,
    /// Visible pages of each sequence of the round.
    pub visible: &'a [usize],
}

/// Optimistic acceptance with other weights than the target's.
const ALPHA: f64 = 0.95;

/// Optimistic acceptance with the target's weights.
const ALPHA_TARGET_WEIGHTS: f64 = 0.99;

/// Loss of acceptance of a draft that reads every 32nd page. It grows with the fifth root of the pages per page read, as
/// observed on widened models for every 4th to every 64th page.
const LOSS: f64 = 0.05;

impl Outlook<'_> {
    /// Most visible pages of a sequence.
    pub fn longest(&self) -> usize {
        self.visible.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of weights and complete pages read by a step of one row per sequence.
    pub fn step_bytes(&self, weights: Weights, view: View, pages: Pages) -> f64 {
        let weights = match weights {
            Weights::Full => self.weights_bytes,
            Weights::Draft | Weights::Draft4 => self.draft_read_bytes,
        };
        let page = match view {
            View::Upper => upper_page_bytes(self.head_dim),
            View::Both => upper_page_bytes(self.head_dim) + lower_page_bytes(self.head_dim),
            View::Full => full_page_bytes(self.head_dim),
        };
        (weights + self.read(pages) * page * self.kv_heads) as f64
    }

    /// Pages that all sequences read in a step, per KV head.
    fn read(&self, pages: Pages) -> usize {
        self.visible.iter().map(|&visible| pages.count().map_or(visible, |n| n.min(visible))).sum()
    }

    /// What is known of draft configurations before they draft.
    fn priors(&self, configs: &[DraftConfig]) -> Vec<Prior> {
        configs.iter().map(|config| self.prior(config)).collect()
    }

    fn prior(&self, config: &DraftConfig) -> Prior {
        let bytes = self.step_bytes(config.weights, config.view, config.pages);
        let (reads, alpha) = match config.weights {
            Weights::Draft | Weights::Draft4 => (Reads::DraftWeights, ALPHA),
            Weights::Full => (Reads::TargetWeights, ALPHA_TARGET_WEIGHTS),
        };
        let per_read = self.read(Pages::All).max(1) as f64 / self.read(config.pages).max(1) as f64;
        let rejections = 1.0 - alpha + LOSS * (per_read.powf(0.2) - 1.0);
        Prior { bytes: bytes / self.plain_bytes(), alpha, rejections, reads }
    }

    /// Bytes of a plain step, as [`Outlook::step_bytes`].
    fn plain_bytes(&self) -> f64 {
        self.step_bytes(Weights::Full, self.target, Pages::All)
    }
}

/// Whether each draft configuration leaves out enough pages. The first is usable in any case.
fn usable_configs(configs: &[DraftConfig], outlook: &Outlook) -> Vec<bool> {
    configs.iter().enumerate().map(|(at, config)| at == 0 || config.leaves_out_enough(outlook.longest())).collect()
}

/// Work of a proposal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Proposed {
    /// Sequential steps that the draft takes without guesses; tokens of the longest proposal if no network runs. The policy
    /// divides the draft's time by them. 0 if nothing was proposed or computed.
    pub steps: usize,
    /// Sequences whose draft was computed and yielded no token.
    pub without_token: usize,
    /// Pages of a cache, the target's or the drafter's own, that each step read; `None` if it reads none.
    pub pages: Option<Pages>,
    /// Tokens of earlier text that the draft network checked, and those that it chose as well.
    pub guessed: (usize, usize),
}

/// The target's backend, as far as drafters may use it.
pub trait Target {
    /// [`forward::draft`].
    ///
    /// # Errors
    /// Those of [`forward::draft`].
    fn draft(&mut self, config: &DraftConfig, turns: &mut [Turn]) -> Result<()>;

    /// As [`Target::draft`], with guesses if the backend drafts step by step.
    ///
    /// # Errors
    /// Those of [`forward::draft_now`].
    fn draft_guessed(&mut self, config: &DraftConfig, turns: &mut [Turn], guesses: &mut dyn Guess) -> Result<()> {
        let _ = guesses;
        self.draft(config, turns)
    }

    /// Writes proposed tokens into the slot's window, after the last emitted one.
    ///
    /// # Errors
    /// Those of [`crate::backend::KvCache::window`] and [`crate::backend::KvCache::set_window`].
    fn set_proposed(&mut self, slot: usize, tokens: &[u32]) -> Result<()>;

    /// [`TokenSampler::set_distribution`]: q of the token after `offset`, needed under rejection unless `turn.q` is
    /// [`quantspec_core::verify::DraftDistribution::OneHot`].
    ///
    /// # Errors
    /// Those of [`TokenSampler::set_distribution`].
    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()>;
}

impl<B: Backend> Target for B {
    fn draft(&mut self, config: &DraftConfig, turns: &mut [Turn]) -> Result<()> {
        forward::draft(self, config, turns)
    }

    fn draft_guessed(&mut self, config: &DraftConfig, turns: &mut [Turn], guesses: &mut dyn Guess) -> Result<()> {
        // If a round runs whole, its drafted tokens are unknown until the verification has ended.
        match self.runs_rounds_whole() {
            true => forward::draft(self, config, turns),
            false => forward::draft_now(self, config, turns, Some(guesses)),
        }
    }

    fn set_proposed(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        // The last emitted token is not the drafter's to write: the target feeds it.
        let mut window = self.window(slot, 1)?;
        window.extend(tokens);
        self.set_window(slot, &window)
    }

    fn set_distribution(&mut self, slot: usize, offset: usize, q: &[f32]) -> Result<()> {
        TokenSampler::set_distribution(self, slot, offset, q)
    }
}

/// The source of a method's drafts.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Nothing: γ is 0.
    Nothing,
    /// The model itself.
    Model {
        /// Weights that a draft step reads.
        weights: Weights,
        /// View of the cache that it reads; `None` is the target's.
        view: Option<View>,
        /// Default pages of a method that chooses them in its own way; `None` if it reads the requested pages.
        pages: Option<Pages>,
    },
    /// Another checkpoint ([`DraftModel`]), which the loader provides.
    Checkpoint,
    /// Several of these, one per round ([`Auto`]).
    Several,
    /// A drafter that reads neither weights nor cache of the target, and takes no settings.
    Other(fn() -> Box<dyn Drafter>),
}

/// A decoding method, by its user-visible name.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Name in flags, reports and docs.
    pub name: &'static str,
    /// What a draft reads, for `--help`.
    pub about: &'static str,
    /// The source of its drafts.
    pub source: Source,
    /// Copies earlier text instead of drafting where that has proved reliable.
    pub copies: bool,
}

/// Default pages of `window` and `snapkv`: 2,048 tokens cost little compared with a long context.
const FIXED_PAGES: usize = 16;

const QUANTSPEC: Source = Source::Model { weights: Weights::Draft, view: Some(View::Upper), pages: None };
const KV4: Source = Source::Model { weights: Weights::Full, view: Some(View::Upper), pages: None };
const W4: Source = Source::Model { weights: Weights::Draft, view: None, pages: None };
const QSPEC: Source = Source::Model { weights: Weights::Draft4, view: None, pages: None };
const WINDOW: Source = Source::Model { weights: Weights::Draft, view: None, pages: Some(Pages::Window(FIXED_PAGES)) };
const SNAP: Pages = Pages::Snap { pages: FIXED_PAGES, refresh: 0 };
const SNAPKV: Source = Source::Model { weights: Weights::Draft, view: Some(View::Upper), pages: Some(SNAP) };
const NGRAM: Source = Source::Other(|| Box::<Ngram>::default());

/// Every method. Flags, reports, `bench`, `eval`, `selftest` and the exactness tests read this list.
pub const METHODS: &[Entry] = &[
    Entry { name: "auto", about: "the fastest of several, as measured", source: Source::Several, copies: true },
    Entry { name: "quantspec", about: "4-bit weights, 4-bit cache", source: QUANTSPEC, copies: false },
    Entry { name: "kv4", about: "full weights, 4-bit cache", source: KV4, copies: false },
    Entry { name: "w4", about: "4-bit weights, the target's cache", source: W4, copies: false },
    Entry { name: "qspec", about: "as w4, with emulated 4-bit activations", source: QSPEC, copies: false },
    Entry { name: "window", about: "as w4, over the first page and the newest", source: WINDOW, copies: false },
    Entry {
        name: "snapkv",
        about: "as quantspec, over pages that the prompt's end attends to",
        source: SNAPKV,
        copies: false,
    },
    Entry { name: "draft-model", about: "another checkpoint", source: Source::Checkpoint, copies: false },
    Entry { name: "ngram", about: "no network, copies earlier text", source: NGRAM, copies: false },
    Entry { name: "ar", about: "no drafts", source: Source::Nothing, copies: false },
    Entry { name: "quantspec+ngram", about: "quantspec or earlier text", source: QUANTSPEC, copies: true },
    Entry { name: "kv4+ngram", about: "kv4 or earlier text", source: KV4, copies: true },
    Entry { name: "w4+ngram", about: "w4 or earlier text", source: W4, copies: true },
    Entry { name: "qspec+ngram", about: "qspec or earlier text", source: QSPEC, copies: true },
    Entry { name: "window+ngram", about: "window or earlier text", source: WINDOW, copies: true },
    Entry { name: "snapkv+ngram", about: "snapkv or earlier text", source: SNAPKV, copies: true },
    Entry { name: "draft-model+ngram", about: "draft-model or earlier text", source: Source::Checkpoint, copies: true },
];

impl Entry {
    /// The method of this name.
    pub fn named(name: &str) -> Option<&'static Entry> {
        METHODS.iter().find(|method| method.name == name)
    }

    /// True if it reads draft weights, and so supports the setting of that name.
    pub fn takes_draft_weights(&self) -> bool {
        matches!(self.source, Source::Model { weights: Weights::Draft | Weights::Draft4, .. } | Source::Several)
    }

    /// Default pages, if the method chooses them in its own way.
    pub fn own_pages(&self) -> Option<Pages> {
        match self.source {
            Source::Model { pages, .. } => pages,
            Source::Nothing | Source::Checkpoint | Source::Several | Source::Other(_) => None,
        }
    }

    /// Pages to read for a requested choice. Methods that choose in their own way use its number only, and the refresh of
    /// [`Pages::Snap`].
    pub fn pages(&self, asked: Pages) -> Pages {
        match (self.own_pages(), asked.count()) {
            (None, _) => asked,
            (Some(own), None) => own,
            (Some(Pages::Snap { refresh, .. }), Some(pages)) => match asked {
                Pages::Snap { .. } => asked,
                _ => Pages::Snap { pages, refresh },
            },
            (Some(_), Some(n)) => Pages::Window(n),
        }
    }

    /// The draft configuration over a target view, with the method's default pages; `None` if the model does not draft for
    /// itself.
    pub fn draft_config(&self, target: View) -> Option<DraftConfig> {
        match self.source {
            Source::Model { weights, view, .. } => {
                Some(DraftConfig { weights, view: view.unwrap_or(target), pages: self.pages(Pages::All) })
            }
            Source::Nothing | Source::Checkpoint | Source::Several | Source::Other(_) => None,
        }
    }

    /// The drafter; `None` if nothing drafts, or if a draft model must draft and `draft_model` is `None`. For self-drafting
    /// methods, each of `pages` (at least one) is a candidate. Without draft weights they use the target's.
    pub fn drafter(
        &self,
        target: View,
        weights: DraftWeights,
        pages: &[Pages],
        draft_model: Option<Box<dyn Drafter>>,
    ) -> Option<Box<dyn Drafter>> {
        let drafter: Box<dyn Drafter> = match (self.draft_config(target), self.source) {
            (Some(config), _) => {
                let weights = if weights == DraftWeights::None { Weights::Full } else { config.weights };
                let configs = pages.iter().map(|&pages| DraftConfig { weights, pages: self.pages(pages), ..config });
                Box::new(SelfQuantised { configs: configs.collect() })
            }
            (None, Source::Several) => Box::new(Auto::new(target, weights, pages, draft_model)),
            (None, Source::Checkpoint) => draft_model?,
            (None, Source::Other(make)) => make(),
            (None, _) => return None,
        };
        Some(if self.copies { Copying::boxed(drafter) } else { drafter })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quantspec_core::Error;

    /// A target without a network, which records what a drafter asks of it.
    #[derive(Debug, Default)]
    pub(super) struct Recorder {
        /// Configurations of the drafts.
        pub(super) drafts: Vec<DraftConfig>,
        /// Slots and their proposed tokens.
        pub(super) proposed: Vec<(usize, Vec<u32>)>,
        /// Plays the draft network's answers to guesses.
        pub(super) network: Option<fn(&mut dyn Guess)>,
    }

    impl Target for Recorder {
        fn draft(&mut self, config: &DraftConfig, _: &mut [Turn]) -> Result<()> {
            self.drafts.push(*config);
            Ok(())
        }

        fn draft_guessed(&mut self, config: &DraftConfig, turns: &mut [Turn], guesses: &mut dyn Guess) -> Result<()> {
            if let Some(network) = self.network {
                network(guesses);
            }
            self.draft(config, turns)
        }

        fn set_proposed(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
            self.proposed.push((slot, tokens.to_vec()));
            Ok(())
        }

        fn set_distribution(&mut self, _: usize, _: usize, _: &[f32]) -> Result<()> {
            Err(Error::internal("a copied token is certain"))
        }
    }

    /// For a model with 64 MiB of weights and 16 MiB of draft weights. 240 of its pages have 61 MiB in both planes.
    pub(super) fn outlook(visible: &[usize]) -> Outlook<'_> {
        let (weights_bytes, draft_read_bytes) = (64 << 20, 16 << 20);
        Outlook { kv_heads: 8, head_dim: 128, target: View::Both, weights_bytes, draft_read_bytes, visible }
    }

    /// Forecasts of a drafter's candidates in that outlook.
    pub(super) fn forecasts(drafter: &dyn Drafter, visible: &[usize], measured: &[Option<(f64, f64)>]) -> Vec<f64> {
        let outlook = outlook(visible);
        quantspec_core::forecast::forecasts(&drafter.usable(&outlook), &drafter.priors(&outlook), measured)
    }

    #[test]
    fn drafters_have_the_needs_of_their_methods() {
        let made = |name: &str, weights| {
            let method = Entry::named(name).unwrap();
            method.drafter(View::Both, weights, &[Pages::Best(3)], None).map(|drafter| drafter.needs())
        };
        let needs = |view: Option<View>, draft_weights| {
            Some(Needs { view, draft_weights, distributions: view.is_some(), page_masses: false })
        };
        let (upper, both) = (Some(View::Upper), Some(View::Both));
        let models = [
            ("quantspec", upper, true),
            ("kv4", upper, false),
            ("w4", both, true),
            ("qspec", both, true),
            ("window", both, true),
        ];
        for (name, view, weights) in models {
            for name in [name, &format!("{name}+ngram")] {
                assert_eq!(made(name, DraftWeights::Int4), needs(view, weights), "{name}");
                assert_eq!(made(name, DraftWeights::None), needs(view, false), "{name}");
                assert_eq!(Entry::named(name).unwrap().takes_draft_weights(), weights, "{name}");
            }
        }
        let snapkv = Needs { view: upper, draft_weights: true, distributions: true, page_masses: true };
        assert_eq!(made("snapkv", DraftWeights::Int4), Some(snapkv));
        assert_eq!(made("snapkv+ngram", DraftWeights::Int4), Some(snapkv));
        assert_eq!(made("ngram", DraftWeights::Int4), needs(None, false));
        assert_eq!(made("ar", DraftWeights::Int4), None);
        assert!(Entry::named("").is_none());
    }

    #[test]
    fn a_window_always_has_the_first_and_the_newest_page() {
        let window = Entry::named("window").unwrap();
        let pages = [Pages::All, Pages::Best(3), Pages::Window(5)].map(|asked| window.pages(asked));
        assert_eq!(pages, [Pages::Window(FIXED_PAGES), Pages::Window(3), Pages::Window(5)]);
        assert_eq!(window.draft_config(View::Full).unwrap().view, View::Full);
        assert_eq!(Entry::named("w4").unwrap().pages(Pages::Best(3)), Pages::Best(3));
    }

    #[test]
    fn snapkv_keeps_its_choice_for_any_number_of_pages() {
        let snap = |pages, refresh| Pages::Snap { pages, refresh };
        let method = Entry::named("snapkv").unwrap();
        let asked = [Pages::All, Pages::Best(3), Pages::Window(5), snap(7, 2)];
        assert_eq!(asked.map(|asked| method.pages(asked)), [snap(FIXED_PAGES, 0), snap(3, 0), snap(5, 0), snap(7, 2)]);
        let stale = |refresh| snap(3, refresh).is_stale(10, 14);
        assert_eq!([0, 1, 4, 5].map(stale), [false, true, true, false]);
        assert!(!Pages::Best(3).is_stale(10, 14));
    }
}
