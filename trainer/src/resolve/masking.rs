//! The tokens of a chat that are trained on.

use super::resolver::Resolver;
use crate::data::{MaskingStrategy, TrainOnEos, TrainedRole};
use crate::recipe::Origin;

/// The turns and the end-of-turn tokens that are trained on.
pub(super) struct Masking {
    pub(super) masking_strategy: MaskingStrategy,
    pub(super) roles_to_train: Vec<TrainedRole>,
    pub(super) train_on_eos: TrainOnEos,
}

pub(super) fn resolve(resolver: &mut Resolver) -> Masking {
    let masking_strategy = masking_strategy(resolver);
    let roles_to_train = roles_to_train(resolver, masking_strategy);
    let train_on_eos = resolver.pick("data.train_on_eos", resolver.recipe().data.train_on_eos, TrainOnEos::Turn);
    Masking { masking_strategy, roles_to_train, train_on_eos }
}

/// Returns the strategy. `mask_inputs` is ArcticTraining's key for two of its values.
fn masking_strategy(resolver: &mut Resolver) -> MaskingStrategy {
    const KEY: &str = "data.masking_strategy";
    const ARCTIC: &str = "data.mask_inputs";
    let data = &resolver.recipe().data;
    let masks = |strategy| strategy != MaskingStrategy::TrainOnAll;
    let of_mask_inputs = data.mask_inputs.map(|mask_inputs| match mask_inputs {
        true => MaskingStrategy::TrainOnAssistant,
        false => MaskingStrategy::TrainOnAll,
    });
    if let (Some(strategy), Some(mask_inputs)) = (data.masking_strategy, data.mask_inputs)
        && masks(strategy) != mask_inputs
    {
        let message = format!("{ARCTIC}: {mask_inputs} contradicts {KEY}");
        resolver.report_with_advice(&[ARCTIC], message, format!("keep {KEY}"));
    }
    let origin = match (data.masking_strategy, of_mask_inputs) {
        (Some(_), _) => resolver.loaded.origin(&[KEY]),
        (None, Some(_)) => resolver.loaded.origin(&[ARCTIC]),
        (None, None) => Origin::Default,
    };
    let strategy = data.masking_strategy.or(of_mask_inputs).unwrap_or(MaskingStrategy::TrainOnAssistant);
    resolver.record(ARCTIC, masks(strategy), origin.clone());
    resolver.record(KEY, strategy, origin)
}

fn roles_to_train(resolver: &mut Resolver, strategy: MaskingStrategy) -> Vec<TrainedRole> {
    const KEY: &str = "data.roles_to_train";
    let given = resolver.recipe().data.roles_to_train.clone();
    if given.as_ref().is_some_and(Vec::is_empty) {
        let advice = "name roles: assistant, user, system or tool";
        resolver.report_with_advice(&[KEY], format!("{KEY}: expected at least one role, found none"), advice);
    }
    if given.is_some() && strategy == MaskingStrategy::TrainOnAll {
        let message = format!("{KEY} has no effect: the loss covers every token");
        resolver.report_with_advice(&[KEY], message, "remove one of data.roles_to_train and train_on_all");
    }
    let mut roles = resolver.pick(KEY, given, vec![TrainedRole::Assistant]);
    roles.sort_by_key(|role| *role as u8);
    roles.dedup();
    roles
}
