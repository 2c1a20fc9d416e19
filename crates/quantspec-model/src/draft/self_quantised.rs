//! The model drafts for itself: weights × view of its cache × pages.

use super::{Drafter, Needs, Outlook, Proposed, Target, usable_configs};
use crate::backend::{DraftConfig, Turn};
use quantspec_core::Result;
use quantspec_core::config::Pages;
use quantspec_core::forecast::Prior;

/// Drafts with the target's own backend, which holds the sequences; this keeps only the configurations, one per candidate.
/// On a GPU the turns carry the configuration to the verification, and both run as one graph.
#[derive(Clone, Debug)]
pub struct SelfQuantised {
    /// What a step of each candidate reads; at least one. Views are that of the first or the target's.
    pub configs: Vec<DraftConfig>,
}

impl SelfQuantised {
    /// The drafter of one configuration.
    pub fn boxed(config: DraftConfig) -> Box<dyn Drafter> {
        Box::new(SelfQuantised { configs: vec![config] })
    }
}

impl Drafter for SelfQuantised {
    fn needs(&self) -> Needs {
        let draft_weights = self.configs.iter().any(|config| config.weights.is_draft());
        let page_masses = self.configs.iter().any(|config| matches!(config.pages, Pages::Snap { .. }));
        Needs { view: Some(self.configs[0].view), draft_weights, distributions: true, page_masses }
    }

    fn margins(&self) -> bool {
        true
    }

    fn candidates(&self) -> usize {
        self.configs.len()
    }

    fn usable(&self, outlook: &Outlook) -> Vec<bool> {
        usable_configs(&self.configs, outlook)
    }

    fn priors(&self, outlook: &Outlook) -> Vec<Prior> {
        // What a user chose is tried in any case.
        if self.configs.len() == 1 { Vec::new() } else { outlook.priors(&self.configs) }
    }

    fn prefill(&mut self, _slot: usize, _prompt: &[u32], _first: u32) -> Result<()> {
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], candidate: usize) -> Result<Proposed> {
        let config = self.configs[candidate];
        let asked: Vec<usize> = turns.iter().map(|turn| turn.gamma).collect();
        target.draft(&config, turns)?;
        // A draft that ended at its first token took a step and yielded none.
        let without_token = turns.iter().zip(asked).filter(|(turn, asked)| turn.gamma == 0 && *asked > 0).count();
        let steps = turns.iter().filter(|turn| !turn.copied).map(|turn| turn.gamma).max().unwrap_or(0).max(1);
        Ok(Proposed { steps, without_token, pages: Some(config.pages), guessed: (0, 0) })
    }

    fn commit(&mut self, _slot: usize, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    fn close(&mut self, _slot: usize) {}
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Recorder, forecasts};
    use super::*;
    use quantspec_core::config::{View, Weights};
    use quantspec_core::sample::Sampler;

    #[test]
    fn candidates_are_configurations_that_leave_out_at_least_a_third_of_the_pages() {
        let config = |pages| DraftConfig { weights: Weights::Draft, view: View::Upper, pages };
        let configs = [Pages::All, Pages::Best(16), Pages::Window(64)].map(config).to_vec();
        let mut drafter = SelfQuantised { configs: configs.clone() };
        let expected = |visible, measured: [_; 3]| forecasts(&drafter, &[3, visible], &measured);
        let usable = |visible| expected(visible, [None; 3]).iter().map(|&forecast| forecast > 0.0).collect::<Vec<_>>();
        assert_eq!(usable(23), [true, false, false]);
        assert_eq!(usable(24), [true, true, false]);
        assert_eq!(usable(96), [true; 3]);
        assert!(!config(Pages::Best(usize::MAX)).leaves_out_enough(96));
        // The fewer bytes, the earlier a configuration is tried. One that is accepted often leaves little to gain by more pages.
        let before = expected(600, [None; 3]);
        assert!(before[1] > before[2] && before[2] > before[0], "{before:?}");
        let after = expected(600, [None, Some((0.3, 0.9)), None]);
        assert!(after[0] < before[0] && after[2] < before[2], "{after:?} {before:?}");
        // A number of pages set by the user is read at any length.
        assert_eq!(forecasts(&*SelfQuantised::boxed(config(Pages::Best(16))), &[], &[None]), [f64::INFINITY]);

        let (mut target, mut turns) = (Recorder::default(), [Turn::new(0, 5, 3, Sampler::greedy())]);
        for (candidate, config) in configs.iter().enumerate() {
            let proposed = drafter.propose(&mut target, &mut turns, candidate).unwrap();
            assert_eq!((proposed.steps, proposed.pages), (3, Some(config.pages)));
        }
        assert_eq!(target.drafts, configs);
    }
}
