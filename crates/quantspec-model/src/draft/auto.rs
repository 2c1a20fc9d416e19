//! `auto`: uses the fastest way to draft, as measured by the policy while decoding.
//!
//! Candidates are several draft configurations and, if given, a draft model. The bytes that a configuration reads bound its
//! speed, and the policy does not try those with too low a bound ([`quantspec_core::forecast`]).

use super::{ALPHA, Drafter, Needs, Outlook, Proposed, SelfQuantised, Target, usable_configs};
use crate::backend::{DraftConfig, Memory, Turn};
use quantspec_core::Result;
use quantspec_core::config::{DraftWeights, Pages, View, Weights};
use quantspec_core::forecast::{Prior, Reads};
use std::collections::HashMap;

/// Tokens of a sequence by which a draft model may lag. After a longer lag it is not used for the rest of the sequence, because
/// every sixteen tokens of the lag take one of its steps.
const LAG: usize = 512;

/// Several ways to draft; the policy chooses one per round.
#[derive(Debug)]
pub struct Auto {
    own: SelfQuantised,
    draft_model: Option<Box<dyn Drafter>>,
    /// Tokens emitted by each of the draft model's sequences after its last draft.
    lags: HashMap<usize, usize>,
}

impl Auto {
    /// Self-drafting with each of `pages` (at least one), and a draft model.
    pub fn new(target: View, weights: DraftWeights, pages: &[Pages], draft_model: Option<Box<dyn Drafter>>) -> Auto {
        let four = if weights == DraftWeights::None { Weights::Full } else { Weights::Draft };
        let config = |weights, view| move |&pages: &Pages| DraftConfig { weights, view, pages };
        let whole = pages.iter().filter(|pages| **pages == Pages::All);
        let wanted = (pages.iter().map(config(four, View::Upper)))
            .chain(whole.map(config(four, target)))
            .chain(pages.iter().map(config(Weights::Full, View::Upper)));
        let mut configs = Vec::new();
        for config in wanted {
            // A draft that reads as much as the target is as slow as plain decoding.
            let saves = (config.weights, config.view, config.pages) != (Weights::Full, target, Pages::All);
            if saves && !configs.contains(&config) {
                configs.push(config);
            }
        }
        if configs.is_empty() {
            configs.push(DraftConfig { weights: four, view: View::Upper, pages: Pages::All });
        }
        Auto { own: SelfQuantised { configs }, draft_model, lags: HashMap::new() }
    }

    /// The draft model if it is the candidate, with the index of its own candidate.
    fn chosen_draft_model(&mut self, candidate: usize) -> Option<(&mut Box<dyn Drafter>, usize)> {
        Some((self.draft_model.as_mut()?, candidate.checked_sub(self.own.configs.len())?))
    }
}

impl Drafter for Auto {
    fn needs(&self) -> Needs {
        self.own.needs()
    }

    fn margins(&self) -> bool {
        true
    }

    fn candidates(&self) -> usize {
        self.own.candidates() + self.draft_model.as_ref().map_or(0, |draft_model| draft_model.candidates())
    }

    fn usable(&self, outlook: &Outlook) -> Vec<bool> {
        let mut usable = usable_configs(&self.own.configs, outlook);
        if outlook.longest() == 0 {
            // Without visible pages all views are equal, so the first configuration suffices.
            usable.iter_mut().zip(&self.own.configs).for_each(|(usable, config)| *usable &= config.view == View::Upper);
        }
        if let Some(draft_model) = &self.draft_model {
            usable.extend(draft_model.usable(outlook).iter().map(|usable| *usable && !self.lags.is_empty()));
        }
        usable
    }

    fn priors(&self, outlook: &Outlook) -> Vec<Prior> {
        let mut priors = outlook.priors(&self.own.configs);
        if let Some(draft_model) = &self.draft_model {
            let bytes = draft_model.memory().draft_weights_bytes as f64 / outlook.plain_bytes();
            priors.resize(self.candidates(), Prior { bytes, alpha: ALPHA, rejections: 1.0, reads: Reads::DraftModel });
        }
        priors
    }

    fn method(&self, candidate: usize) -> Option<&'static str> {
        Some(match self.own.configs.get(candidate) {
            None => "draft-model",
            Some(DraftConfig { weights: Weights::Full, .. }) => "kv4",
            Some(DraftConfig { view: View::Upper, .. }) => "quantspec",
            Some(_) => "w4",
        })
    }

    fn read_prompt(&mut self, slot: usize, prompt: &[u32], most_work: f64, progress: &mut dyn FnMut()) -> Result<bool> {
        let read = |of: &mut Box<dyn Drafter>| of.read_prompt(slot, prompt, most_work, progress);
        self.draft_model.as_mut().map_or(Ok(true), read)
    }

    fn prefill(&mut self, slot: usize, prompt: &[u32], first: u32) -> Result<()> {
        match &mut self.draft_model {
            None => Ok(()),
            Some(draft_model) => {
                self.lags.insert(slot, 0);
                draft_model.prefill(slot, prompt, first)
            }
        }
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], candidate: usize) -> Result<Proposed> {
        let Some((draft_model, candidate)) = self.chosen_draft_model(candidate) else {
            return self.own.propose(target, turns, candidate);
        };
        let proposed = draft_model.propose(target, turns, candidate)?;
        for turn in turns.iter().filter(|turn| !turn.copied) {
            self.lags.entry(turn.slot).and_modify(|lag| *lag = 0);
        }
        Ok(proposed)
    }

    fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        let (Some(draft_model), Some(lag)) = (&mut self.draft_model, self.lags.get_mut(&slot)) else { return Ok(()) };
        *lag += tokens.len();
        if *lag > LAG {
            self.close(slot);
            return Ok(());
        }
        draft_model.commit(slot, tokens)
    }

    fn close(&mut self, slot: usize) {
        self.lags.remove(&slot);
        if let Some(draft_model) = &mut self.draft_model {
            draft_model.close(slot);
        }
    }

    fn memory(&self) -> Memory {
        self.draft_model.as_ref().map_or_else(Memory::default, |draft_model| draft_model.memory())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Recorder, forecasts};
    use super::*;
    use quantspec_core::sample::Sampler;
    use std::sync::{Arc, Mutex};

    const PAGES: [Pages; 3] = [Pages::All, Pages::Best(16), Pages::Best(64)];

    fn methods(auto: &Auto) -> Vec<(&'static str, Pages)> {
        let config = |at: usize| auto.own.configs.get(at).map_or(Pages::All, |config| config.pages);
        (0..auto.candidates()).map(|at| (auto.method(at).unwrap(), config(at))).collect()
    }

    #[test]
    fn candidates_are_what_can_be_faster_than_the_target() {
        let [all, few, more] = PAGES;
        let auto = |target, weights| Auto::new(target, weights, &PAGES, None);
        let (int4, none) = (DraftWeights::Int4, DraftWeights::None);
        let quantspec = PAGES.map(|pages| ("quantspec", pages));
        let kv4 = PAGES.map(|pages| ("kv4", pages));
        let every = [&quantspec[..], &[("w4", all)], &kv4].concat();
        assert_eq!(methods(&auto(View::Both, int4)), every);
        assert_eq!(methods(&auto(View::Full, int4)), every);
        assert_eq!(methods(&auto(View::Both, none)), kv4);
        // If the target reads the upper nibbles, they are its own cache.
        assert_eq!(methods(&auto(View::Upper, int4)), [&quantspec[..], &[("kv4", few), ("kv4", more)]].concat());
        assert_eq!(methods(&Auto::new(View::Upper, none, &[all], None)), [("kv4", all)]);
        assert_eq!(
            auto(View::Both, int4).needs(),
            Needs { view: Some(View::Upper), draft_weights: true, distributions: true, page_masses: false }
        );
        assert!(!auto(View::Both, none).needs().draft_weights);
    }

    #[test]
    fn forecasts_follow_the_bytes_of_the_context_and_the_batch() {
        let auto = Auto::new(View::Both, DraftWeights::Int4, &PAGES, None);
        let forecasts = |visible: &[usize]| forecasts(&auto, visible, &[None; 7]);
        // Without a cache all views are equal, and the target's weights save nothing.
        let short = forecasts(&[0]);
        assert!(short[3] == 0.0 && short[4] < 1.01 && short[0] > 2.0, "{short:?}");
        let some = forecasts(&[10]);
        assert!(some[3] > 2.0 && some[3] < some[0], "{some:?}");
        assert_eq!([short[1], short[2]], [0.0; 2], "no pages to leave out");
        // Selected pages of a long context, and 4-bit weights before those of the target.
        let long = forecasts(&[1_000]);
        assert!(long[1] > long[2] && long[2] > long[5] && long[5] > long[0] && long[0] > long[3], "{long:?}");
        // A batch of long contexts: its caches outweigh the weights, which all sequences share.
        let batch = forecasts(&[1_000; 16]);
        assert!(batch[5] > long[5] + 1.0 && batch[5] > batch[1], "{batch:?}");
    }

    /// A draft model that records its calls.
    #[derive(Clone, Debug, Default)]
    struct Noted(Arc<Mutex<Vec<String>>>);

    impl Noted {
        fn note(&self, what: String) {
            self.0.lock().unwrap().push(what);
        }
    }

    impl Drafter for Noted {
        fn needs(&self) -> Needs {
            Needs::default()
        }

        fn candidates(&self) -> usize {
            2
        }

        fn prefill(&mut self, slot: usize, _: &[u32], first: u32) -> Result<()> {
            self.note(format!("{slot} begins {first}"));
            Ok(())
        }

        fn propose(&mut self, _: &mut dyn Target, _: &mut [Turn], candidate: usize) -> Result<Proposed> {
            self.note(format!("candidate {candidate}"));
            Ok(Proposed { steps: 3, pages: Some(Pages::All), ..Proposed::default() })
        }

        fn commit(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
            self.note(format!("{slot} goes on by {}", tokens.len()));
            Ok(())
        }

        fn close(&mut self, slot: usize) {
            self.note(format!("{slot} ends"));
        }

        fn memory(&self) -> Memory {
            Memory { draft_weights_bytes: 8 << 20, ..Memory::default() }
        }
    }

    #[test]
    fn a_draft_model_is_a_candidate_until_it_lags_too_far_behind() {
        let noted = Noted::default();
        let mut auto = Auto::new(View::Both, DraftWeights::Int4, &PAGES, Some(Box::new(noted.clone())));
        assert_eq!((auto.candidates(), auto.method(8)), (9, Some("draft-model")));
        assert_eq!(auto.memory().draft_weights_bytes, 8 << 20);
        let forecast = |auto: &Auto| forecasts(auto, &[0], &[None; 9])[7..].to_vec();
        assert_eq!(forecast(&auto), [0.0; 2], "it has read no prompt");
        auto.prefill(3, &[1, 2], 5).unwrap();
        assert!(forecast(&auto)[0] > 2.0);
        let mut turns = [Turn::new(3, 2, 3, Sampler::greedy())];
        auto.propose(&mut Recorder::default(), &mut turns, 0).unwrap();
        auto.commit(3, &[7; 500]).unwrap();
        assert_eq!(auto.propose(&mut Recorder::default(), &mut turns, 8).unwrap().steps, 3);
        auto.commit(3, &[7; 500]).unwrap();
        auto.commit(3, &[7; 13]).unwrap();
        assert_eq!(forecast(&auto), [0.0; 2]);
        auto.commit(3, &[7; 13]).unwrap();
        auto.close(3);
        let expected = ["3 begins 5", "3 goes on by 500", "candidate 1", "3 goes on by 500", "3 ends", "3 ends"];
        assert_eq!(*noted.0.lock().unwrap(), expected);
    }
}
