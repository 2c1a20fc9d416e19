//! Rounds: described in one copy, launched kernel by kernel or as a recorded graph.

use super::CudaBackend;
use super::describe::{StepLayout, Writer};
use super::sampler::keeps_logits;
use crate::device::Mark;
use crate::recorded::State;
use crate::sample::SamplingFeatures;
use quantspec_core::verify::Verdict;
use quantspec_core::{ErrorKind, Result};
use quantspec_model::backend::{DeviceSeconds, Executor, RoundSteps};
use quantspec_model::forward;

/// Events at points of a round.
pub(super) struct Clock {
    pub(super) start: Mark,
    pub(super) drafted: Mark,
    pub(super) judged: Mark,
    /// The marks belong to the last round. The host times rounds without a verification.
    pub(super) ran: bool,
}

/// A round whose description is on the device.
struct Described<'a> {
    round: &'a RoundSteps<'a>,
    /// Layouts of its steps, in order.
    layouts: Vec<StepLayout>,
    /// Address of its turns; 0 without verification.
    turns: u64,
    features: SamplingFeatures,
}

impl Executor for CudaBackend {
    fn runs_rounds_whole(&self) -> bool {
        true
    }

    /// Recomputes the draft weights from the target's and waits, because draft kernels read weights before the previous kernel
    /// has ended.
    fn restore_drafts(&mut self) -> Result<()> {
        if self.overwritten && self.weights.drafts.is_some() {
            self.weights.quantise(&self.linear, self.sampling.shared())?;
            self.device.synchronize()?;
            self.overwritten = false;
        }
        Ok(())
    }

    fn run(&mut self, round: &RoundSteps) -> Result<Vec<Verdict>> {
        self.restore_head()?;
        if round.drafts().any(|step| step.weights.is_draft()) {
            self.restore_drafts()?;
        }
        let described = self.describe_round(round)?;
        self.launch_round(&described)?;
        self.clock.ran = round.verification().is_some();
        match round.verification() {
            Some(_) => self.read_verdicts(round.turns),
            None => Ok(Vec::new()),
        }
    }

    fn device_seconds(&mut self) -> Result<Option<DeviceSeconds>> {
        let Clock { start, drafted, judged, ran } = &self.clock;
        let seconds =
            || Ok(DeviceSeconds { drafting: start.seconds_to(drafted)?, verification: drafted.seconds_to(judged)? });
        ran.then(seconds).transpose()
    }
}

impl CudaBackend {
    /// Copies a round's description to the device. Draft steps without verification use one fixed address, so they share a
    /// graph.
    fn describe_round<'a>(&mut self, round: &'a RoundSteps) -> Result<Described<'a>> {
        let features = self.sampling.upload(round.turns)?;
        self.stage()?;
        // With a grammar every step runs alone (`forward::draft`).
        for step in round.drafts().chain(round.verification()) {
            self.sampling.upload_masks(step.rows, round.turns)?;
        }
        let (mut at, mut layouts, mut turns) = (0, Vec::new(), 0);
        for step in round.drafts() {
            layouts.push(StepLayout { drafts: true, ..self.describe(&step, &mut at)? });
            for row in step.rows {
                self.sampling.drafts(row.slot, row.offset);
            }
        }
        if let Some(step) = round.verification() {
            layouts.push(self.describe(&step, &mut at)?);
            let described = self.sampling.describe(step.rows, round.turns)?;
            let mut writer = Writer { pinned: &mut self.step.staging[self.staged], at };
            turns = self.step.description.at(writer.put(&described)?);
            at = writer.at;
        }
        self.send(at)?;
        Ok(Described { round, layouts, turns, features })
    }

    /// Queues the steps of a described round; `recording`: into a graph.
    fn queue(&mut self, described: &Described, recording: bool) -> Result<()> {
        self.described = Some(described.layouts.clone().into_iter());
        let queued = self.queue_steps(described, recording);
        self.described = None;
        queued
    }

    fn queue_steps(&mut self, described: &Described, recording: bool) -> Result<()> {
        let Described { round, turns, features, .. } = described;
        let timed = round.verification().is_some();
        if timed {
            self.clock.start.set(recording)?;
        }
        forward::steps(self, round, |backend| if timed { backend.clock.drafted.set(recording) } else { Ok(()) })?;
        if let Some(step) = round.verification() {
            let (count, logits) = (step.rows.len(), self.step.logits.at(0));
            self.keep_logits(count, round.turns)?;
            self.sampling.judge(*turns, round.turns.len(), count, self.layout.rows, logits, *features)?;
            self.clock.judged.set(recording)?;
        }
        Ok(())
    }

    /// Runs the round's launches, as a graph from the third round of a kind on: one launch instead of some hundred per step.
    /// Rounds whose unpenalised logits the host reads use no graph.
    fn launch_round(&mut self, described: &Described) -> Result<()> {
        self.unpenalised.clear();
        if keeps_logits(described.round.turns) {
            return self.queue(described, false);
        }
        let key = self.round_key(described);
        let steps = described.layouts.len();
        match self.recorded.find(&key) {
            // SAFETY: all recorded memory belongs to this backend; addresses of buffers that may be replaced are part of the
            // key.
            Some(State::Graph(graph)) => unsafe { graph.launch() },
            Some(State::Refused) => self.queue(described, false),
            None if self.device.one_by_one => self.queue(described, false),
            None => {
                self.recorded.note(key, State::Seen, steps);
                self.queue(described, false)
            }
            Some(State::Seen) => {
                // Launches kernel by kernel once more, and records while the GPU works: building a graph of thousands of
                // launches takes milliseconds.
                self.queue(described, false)?;
                let device = self.device.clone();
                // The memory plan does not count graphs. If memory is short or the driver refuses, the round is only slower.
                let state = match device.record(|| self.queue(described, true)) {
                    Ok(graph) => State::Graph(graph),
                    Err(error) if matches!(error.kind, ErrorKind::DoesNotFit | ErrorKind::Device) => State::Refused,
                    Err(error) => return Err(error),
                };
                self.recorded.note(key, state, steps);
                Ok(())
            }
        }
    }

    /// Everything that determines a round's kernels, grids and addresses.
    fn round_key(&self, described: &Described) -> Vec<u64> {
        let Described { round, layouts, turns, features } = described;
        let judged = if round.verification().is_some() { round.turns.len() } else { 0 };
        let SamplingFeatures { warm, rejects, penalises, masks } = *features;
        let how = [warm, rejects, penalises, masks].iter().rev().fold(0, |how, &one| how << 1 | u64::from(one));
        let mut key = vec![*turns, judged as u64, how, self.sampling.draft_address()];
        for (step, layout) in round.drafts().chain(round.verification()).zip(layouts) {
            self.step_key(&step, layout, &mut key);
        }
        key
    }
}
