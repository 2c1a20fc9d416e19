//! Conversion of Python arguments to engine options.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use quantspec_core::ablation::{Ablation, Axis};
use quantspec_core::cache::{G, GAMMA_MAX};
use quantspec_core::config::{
    DraftWeights, ModelConfig, Pages, Planes, Rounding, Sensitive, TargetWeights, View, Weights,
};
use quantspec_core::page_pool::kept_of_window;
use quantspec_core::policy::Policy;
use quantspec_core::sample::Accept;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{DraftConfig, Options};
use quantspec_model::draft::{CATCH_UP_ROWS, Drafter, Entry, METHODS, Needs, Source};
use quantspec_model::engine::Method;

/// Rows of a prefill block on a CPU. Enough to amortise reading the weights; few enough that one operation of a 7B model
/// stays below the 0.3 s in which an interrupt must act.
pub(crate) const BLOCK_ROWS: usize = 256;

/// Longest γ of the automatic policy. Acceptance of long runs decays geometrically; beyond 12 the optimum of every measured
/// cost table is flat.
pub(crate) const GAMMA_AUTO: usize = 12;

/// Rows of the largest step: CUDA's limit for a grid's second dimension. Logits of this many rows take gigabytes.
pub(crate) const STEP_ROWS_MAX: usize = (1 << 16) - 1;

/// Numbers of draft pages among which the policy chooses by measurement; "all" is another candidate. The least one takes little
/// time to read, and each is four times the one before it.
pub(crate) const PAGES_AUTO: [usize; 3] = [16, 64, 256];

/// Pages of a draft, as Python passes them; None means all.
#[derive(Clone, FromPyObject)]
pub(crate) enum DraftPages {
    Count(usize),
    /// "auto".
    Word(String),
}

/// The arguments that shape an engine, as Python passes them. The default is an engine's own, for one sequence of one token.
pub(crate) struct EngineArguments {
    /// "auto", "cpu", "cuda" or "cuda:N".
    pub(crate) device: String,
    pub(crate) weights: String,
    pub(crate) kv_target: String,
    pub(crate) method: String,
    pub(crate) kv_rounding: String,
    pub(crate) draft_weights: String,
    pub(crate) draft_precision: String,
    pub(crate) draft_pages: Option<DraftPages>,
    pub(crate) page_choice: String,
    /// New pages after which a draft of `snapkv` chooses again; 0 is never.
    pub(crate) draft_refresh: usize,
    /// View of a draft model's cache; `None` for the target's.
    pub(crate) draft_model_kv: Option<String>,
    pub(crate) accept: String,
    pub(crate) gamma: Option<usize>,
    pub(crate) capacity: usize,
    /// Tokens of the longest prompt; `None` for `capacity`, which also limits it.
    pub(crate) prompt_capacity: Option<usize>,
    pub(crate) slots: usize,
    /// Tokens that all sequences share; `None` for the longest context in every slot.
    pub(crate) pool_tokens: Option<usize>,
    /// Worker threads of a CPU; `None` for [`default_threads`].
    pub(crate) threads: Option<usize>,
    /// Keep what every method with this target needs, and room for the longest γ, so that the method can be changed later. A
    /// cache in FP16 serves every target.
    pub(crate) every_method: bool,
}

impl Default for EngineArguments {
    fn default() -> Self {
        EngineArguments {
            device: "auto".to_owned(),
            weights: "checkpoint".to_owned(),
            kv_target: "int8".to_owned(),
            method: "quantspec".to_owned(),
            kv_rounding: "balanced".to_owned(),
            draft_weights: "int4".to_owned(),
            draft_precision: "auto".to_owned(),
            draft_pages: None,
            page_choice: "best".to_owned(),
            draft_refresh: 0,
            draft_model_kv: None,
            accept: "replay".to_owned(),
            gamma: None,
            capacity: 1,
            prompt_capacity: None,
            slots: 1,
            pool_tokens: None,
            threads: None,
            every_method: false,
        }
    }
}

/// Default number of worker threads: one per processor the process may use.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Arguments, checked and translated.
pub(crate) struct Resolved {
    pub(crate) method: Method,
    pub(crate) options: Options,
    /// [`crate::device::ChosenDevice::resolve_auto`] chooses the target's weights; `options` has the checkpoint's.
    pub(crate) auto_weights: bool,
    /// If set, sensitive matrices are chosen by the bytes of a draft step ([`crate::device::ChosenDevice::resolve_auto`]);
    /// `options` has none.
    pub(crate) auto_precision: bool,
    /// What a draft reads of the cache.
    pub(crate) drafted: DraftedCache,
    pub(crate) accept: Accept,
    /// How the method drafts with a draft model, if it may; its drafter is then made with that model.
    pub(crate) draft_model: Option<WithDraftModel>,
    pub(crate) draft_model_cache: DraftModelCache,
    /// As in [`EngineArguments`].
    pub(crate) every_method: bool,
}

/// The cache of a draft model.
#[derive(Clone, Copy, Default)]
pub(crate) struct DraftModelCache {
    /// The view that it keeps; `None` for the target's planes.
    view: Option<View>,
    /// Pages of the longest page window that a step reads; `None` if steps read other pages, too.
    window: Option<usize>,
    /// It may begin in the middle of an answer, whose text is then its prompt.
    begins_late: bool,
}

/// What a draft step reads of one sequence's cache.
#[derive(Clone, Copy)]
pub(crate) struct DraftedCache {
    pub(crate) view: View,
    pub(crate) most_tokens: usize,
}

/// How a method drafts with a draft model.
pub(crate) struct WithDraftModel {
    pub(crate) entry: &'static Entry,
    /// The target's view.
    pub(crate) target: View,
    /// The view of the draft model's own cache.
    pub(crate) view: View,
    pub(crate) weights: DraftWeights,
    /// One choice for each candidate.
    pub(crate) pages: Vec<Pages>,
}

impl WithDraftModel {
    /// The method's drafter; `None` if it needs a draft model and there is none.
    pub(crate) fn drafter(&self, draft_model: Option<Box<dyn Drafter>>) -> Option<Box<dyn Drafter>> {
        self.entry.drafter(self.target, self.weights, &self.pages, draft_model)
    }
}

/// Options of the draft model's backend, next to the target's. `draft`: the draft model's configuration.
pub(crate) fn of_draft(target: &Options, cache: DraftModelCache, draft: &ModelConfig) -> Options {
    let reach = draft.local.as_ref().map(|local| local.reach);
    // The target admits sequences by its own pool, so the draft's pool has room for every slot.
    Options {
        draft_weights: DraftWeights::None,
        page_masses: false,
        step_rows: target.slots.max(CATCH_UP_ROWS),
        pool_pages: usize::MAX,
        kept_pages: cache.window.map_or(usize::MAX, |window| kept_of_window(window, reach)),
        planes: cache.view.map_or(target.planes, |view| Planes::of(&[view])),
        prompt_capacity: if cache.begins_late { target.capacity } else { target.prompt_capacity },
        ..target.clone()
    }
}

/// The most tokens of the pages that a choice reads; `usize::MAX` for all.
fn most_tokens(pages: Pages) -> usize {
    match pages {
        Pages::Tokens(tokens) => tokens,
        _ => pages.count().map_or(usize::MAX, |pages| pages.saturating_mul(G)),
    }
}

/// Values of the `weights` argument.
const WEIGHTS: [(&str, TargetWeights); 3] =
    [("checkpoint", TargetWeights::Checkpoint), ("int8", TargetWeights::Int8), ("int4", TargetWeights::Int4)];

/// What `weights` calls a kind.
pub(crate) fn weights_name(weights: TargetWeights) -> &'static str {
    WEIGHTS.iter().find(|(_, known)| *known == weights).map_or("", |(name, _)| name)
}

/// The target's weights for a `weights` argument; None for "auto".
pub(crate) fn target_weights(name: &str) -> Result<Option<TargetWeights>> {
    let [checkpoint, int8, int4] = WEIGHTS.map(|(name, weights)| (name, Some(weights)));
    one_of("weights", name, &[checkpoint, int8, int4, ("auto", None)])
}

/// The sensitive matrices named by `draft_precision`; None for "auto".
pub(crate) fn sensitive(names: &str) -> Result<Option<Sensitive>> {
    if names == "auto" {
        return Ok(None);
    }
    Sensitive::named(names).map(Some).ok_or_else(|| {
        let kinds = Sensitive::KINDS.join(", ");
        Error::usage(format!("draft_precision is {names:?}"), format!("use auto, none, or a comma list of {kinds}"))
    })
}

/// Values of the `kv_target` argument.
const KV_TARGETS: [(&str, View); 3] = [("int8", View::Both), ("fp16", View::Full), ("int4", View::Upper)];

/// The view named by `kv_target`.
pub(crate) fn target_view(name: &str) -> Result<View> {
    one_of("kv_target", name, &KV_TARGETS)
}

/// What `kv_target` calls a view.
pub(crate) fn target_name(view: View) -> Option<&'static str> {
    KV_TARGETS.iter().find(|(_, known)| *known == view).map(|(name, _)| *name)
}

fn one_of<T: Copy>(flag: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    choices.iter().find(|(name, _)| *name == value).map(|&(_, choice)| choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|&(name, _)| name).collect();
        Error::usage(format!("{flag} is {value:?}"), format!("use one of {}", names.join(", ")))
    })
}

/// The rounding of `kv_rounding`.
pub(crate) fn rounding(name: &str) -> Result<Rounding> {
    one_of("kv_rounding", name, &[("balanced", Rounding::Balanced), ("paper", Rounding::Paper)])
}

/// The ablation of (axis of the keys, axis of the values, elements of a group, truncated codes).
pub(crate) fn ablation((keys, values, group, truncated): &(String, String, usize, bool)) -> Result<Ablation> {
    let axis = |flag, name: &str| one_of(flag, name, &[("channel", Axis::Channel), ("token", Axis::Token)]);
    if !(1..=G).contains(group) {
        return Err(Error::usage(format!("group is {group}"), format!("use 1 to {G}")));
    }
    let (key_axis, value_axis) = (axis("k_axis", keys)?, axis("v_axis", values)?);
    Ok(Ablation { key_axis, value_axis, group: *group, truncated: *truncated })
}

impl EngineArguments {
    /// That of an engine for sequences of `capacity` tokens, with Python's other keyword arguments (`_Options` of `_native.pyi`).
    ///
    /// # Errors
    /// TypeError for another name or type.
    pub(crate) fn of(capacity: usize, options: Option<&Bound<'_, PyDict>>) -> PyResult<EngineArguments> {
        let mut arguments = EngineArguments { capacity, ..EngineArguments::default() };
        for (name, value) in options.into_iter().flatten() {
            let name = name.cast_into::<PyString>()?;
            match &*name.to_cow()? {
                "device" => arguments.device = value.extract()?,
                "weights" => arguments.weights = value.extract()?,
                "kv_target" => arguments.kv_target = value.extract()?,
                "method" => arguments.method = value.extract()?,
                "kv_rounding" => arguments.kv_rounding = value.extract()?,
                "draft_weights" => arguments.draft_weights = value.extract()?,
                "draft_precision" => arguments.draft_precision = value.extract()?,
                "draft_pages" => arguments.draft_pages = value.extract()?,
                "page_choice" => arguments.page_choice = value.extract()?,
                "draft_refresh" => arguments.draft_refresh = value.extract()?,
                "draft_model_kv" => arguments.draft_model_kv = value.extract()?,
                "accept" => arguments.accept = value.extract()?,
                "gamma" => arguments.gamma = value.extract()?,
                "prompt_capacity" => arguments.prompt_capacity = value.extract()?,
                "slots" => arguments.slots = value.extract()?,
                "pool_tokens" => arguments.pool_tokens = value.extract()?,
                "threads" => arguments.threads = value.extract()?,
                "every_method" => arguments.every_method = value.extract()?,
                other => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{other}'"))),
            }
        }
        Ok(arguments)
    }

    /// The choices of pages for a draft, at least one.
    fn pages(&self, method: &Entry) -> Result<Vec<Pages>> {
        let refresh = self.draft_refresh;
        let snap: fn(usize, usize) -> Pages = |pages, refresh| Pages::Snap { pages, refresh };
        let best: fn(usize, usize) -> Pages = |pages, _| Pages::Best(pages);
        let window: fn(usize, usize) -> Pages = |pages, _| Pages::Window(pages);
        let choice = one_of("page_choice", &self.page_choice, &[("best", best), ("window", window), ("snap", snap)])?;
        let chosen = |count| choice(count, refresh);
        Ok(match self.draft_pages {
            None => match method.own_pages() {
                Some(Pages::Snap { pages, .. }) => vec![snap(pages, refresh)],
                _ => vec![Pages::All],
            },
            Some(DraftPages::Word(ref word)) if word == "auto" => {
                let all = method.own_pages().is_none().then_some(Pages::All);
                all.into_iter().chain(PAGES_AUTO.map(chosen)).collect()
            }
            Some(DraftPages::Word(ref word)) => {
                return Err(Error::usage(format!("draft_pages is {word:?}"), "use a number, or auto, or None for all"));
            }
            Some(DraftPages::Count(count)) if count < 2 => {
                return Err(Error::usage(
                    format!("draft_pages is {count}"),
                    "use at least 2 (the first and the newest page are always read), or all",
                ));
            }
            Some(DraftPages::Count(count)) => vec![chosen(count)],
        })
    }

    fn policy(&self) -> Result<Policy> {
        match self.gamma {
            Some(gamma) if gamma > GAMMA_MAX => Err(Error::usage(
                format!("gamma is {gamma}"),
                format!("use 0 to {GAMMA_MAX}, or auto; longer drafts do not pay"),
            )),
            Some(gamma) => Ok(Policy::fixed(gamma)),
            None => Ok(Policy::auto(GAMMA_AUTO)),
        }
    }

    /// The longest γ. `drafts`: the method drafts.
    fn longest_gamma(&self, drafts: bool) -> usize {
        match self.every_method {
            true => GAMMA_MAX,
            false if drafts => self.gamma.unwrap_or(GAMMA_AUTO),
            false => 0,
        }
    }

    /// Rows of the largest step: one of every slot with the longest γ.
    fn step_rows(&self, longest: usize) -> Result<usize> {
        let step_rows = self.slots.saturating_mul(longest + 1);
        if step_rows > STEP_ROWS_MAX {
            return Err(Error::usage(
                format!("{} slots of up to {} rows make a step of {step_rows} rows", self.slots, longest + 1),
                format!("keep slots × (γ + 1) within {STEP_ROWS_MAX}"),
            ));
        }
        Ok(step_rows)
    }

    /// Checks every value and derives planes, draft and policy.
    pub(crate) fn resolve(&self) -> Result<Resolved> {
        let weights = target_weights(&self.weights)?;
        let target = target_view(&self.kv_target)?;
        let draft_model_view =
            self.draft_model_kv.as_ref().map(|name| one_of("draft_model_kv", name, &KV_TARGETS)).transpose()?;
        let rounding = rounding(&self.kv_rounding)?;
        let wanted = one_of(
            "draft_weights",
            &self.draft_weights,
            &[("int4", DraftWeights::Int4), ("int4-mlp", DraftWeights::Int4Mlp), ("none", DraftWeights::None)],
        )?;
        let sensitive = sensitive(&self.draft_precision)?;
        let accept = one_of("accept", &self.accept, &[("replay", Accept::Replay), ("rejection", Accept::Rejection)])?;
        let named: Vec<_> = METHODS.iter().map(|method| (method.name, method)).collect();
        let method = one_of("method", &self.method, &named)?;
        let pages = self.pages(method)?;
        let fewest = pages.iter().map(|&asked| most_tokens(method.pages(asked))).min().unwrap_or(0);
        let drafter = method.drafter(target, wanted, &pages, None);
        let takes_one = matches!(method.source, Source::Checkpoint | Source::Several);
        let view = draft_model_view.unwrap_or(target);
        let mut windows = pages.iter().map(|&pages| DraftConfig { weights: Weights::Full, view, pages }.window());
        let window = windows.try_fold(0, |longest: usize, window| window.map(|pages| longest.max(pages)));
        // Other methods may read other planes and pages. Planes that this one does not read would score replaced pages.
        let draft_model_cache = DraftModelCache {
            view: draft_model_view.or_else(|| (!self.every_method).then_some(target)),
            window: window.filter(|_| !self.every_method),
            begins_late: self.every_method,
        };
        let draft_model = takes_one.then_some(WithDraftModel { entry: method, target, view, weights: wanted, pages });
        let needs = match &drafter {
            Some(drafter) => drafter.needs(),
            None => Needs { distributions: draft_model.is_some(), ..Needs::default() },
        };
        let drafted = DraftedCache { view: needs.view.unwrap_or(target), most_tokens: fewest };
        let needs = match self.every_method {
            true => Needs { draft_weights: true, distributions: true, page_masses: true, ..needs },
            false => needs,
        };
        let policy = self.policy()?;
        let gamma = self.longest_gamma(drafter.is_some() || draft_model.is_some());
        let step_rows = self.step_rows(gamma)?;
        if self.capacity == 0 || self.slots == 0 {
            return Err(Error::usage(
                format!("an engine of {} slots of {} tokens holds nothing", self.slots, self.capacity),
                "ask for at least one slot and two tokens",
            ));
        }
        let views: Vec<View> = match self.every_method {
            true => vec![View::Upper, View::Both, target],
            false => std::iter::once(target).chain(needs.view).collect(),
        };
        Ok(Resolved {
            method: Method { target, drafter, policy },
            options: Options {
                // The longest sequence always fits.
                pool_pages: self.pool_tokens.map_or(usize::MAX, |tokens| tokens.max(self.capacity) / G),
                kept_pages: usize::MAX,
                slots: self.slots,
                capacity: self.capacity,
                prompt_capacity: self.prompt_capacity.unwrap_or(self.capacity).clamp(1, self.capacity),
                planes: Planes::of(&views),
                rounding,
                ablation: None,
                weights: weights.unwrap_or_default(),
                draft_weights: if needs.draft_weights { wanted } else { DraftWeights::None },
                sensitive: sensitive.filter(|_| needs.draft_weights).unwrap_or_default(),
                page_masses: needs.page_masses,
                rejection: accept == Accept::Rejection && needs.distributions,
                rejection_gamma: if accept == Accept::Rejection { gamma } else { 0 },
                step_rows,
                block_rows: BLOCK_ROWS,
                threads: self.threads.unwrap_or_else(default_threads),
            },
            auto_weights: weights.is_none(),
            auto_precision: sensitive.is_none(),
            drafted,
            accept,
            draft_model,
            draft_model_cache,
            every_method: self.every_method,
        })
    }
}
