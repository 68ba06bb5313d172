//! Assignment of requests to data parallel ranks. Neighbors share prefixes, so they go to one rank.

use std::collections::HashMap;
use std::hash::Hash;

use candlewick_comm::Collective;

/// Returns this rank's share of `order`, balanced by `costs`, among items whose owners are `open`. Items of one owner
/// stay on one rank. `costs` are in the order of `order`.
pub(super) fn assign_to_rank<O: Copy + Eq + Hash>(
    ranks: &dyn Collective,
    order: &[usize],
    costs: &[usize],
    owners: &[O],
    open: impl Fn(&O) -> bool,
) -> Vec<usize> {
    let is_open = |item: usize| open(&owners[item]);
    let mut cost_of: HashMap<O, usize> = HashMap::new();
    for (item, cost) in order.iter().zip(costs).filter(|(item, _)| is_open(**item)) {
        *cost_of.entry(owners[*item]).or_default() += cost.max(&1);
    }
    let total: usize = cost_of.values().sum();
    // An owner's position is that of its first item.
    let (mut before, mut rank_of) = (0, HashMap::new());
    for owner in order.iter().map(|item| owners[*item]).filter(|owner| open(owner)) {
        rank_of.entry(owner).or_insert_with(|| {
            let cost = cost_of[&owner];
            before += cost;
            // The midpoint of its cost decides the rank.
            (2 * before - cost) * ranks.size() / (2 * total)
        });
    }
    let is_own = |item: &usize| rank_of.get(&owners[*item]) == Some(&ranks.rank());
    order.iter().copied().filter(is_own).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_comm::{Error, Options, Solo, World, threads};

    use super::*;

    #[test]
    fn ranks_share_the_open_work_evenly_and_keep_an_owners_items_together() {
        let order: Vec<usize> = (0..100).rev().collect();
        let costs: Vec<usize> = order.iter().map(|item| 1 + item % 7).collect();
        let owners: Vec<usize> = (0..100).map(|item| if item < 10 { 0 } else { item }).collect();
        let open = |owner: &usize| owner % 5 != 1;
        let share = |ranks: &dyn Collective| assign_to_rank(ranks, &order, &costs, &owners, open);
        let alone = share(&Solo);
        assert!(alone.iter().eq(order.iter().filter(|item| open(&owners[**item]))));
        let shares =
            threads::run(3, Options::default(), |world: &World| Ok::<_, Error>(share(&*world.group()))).unwrap();
        let mut all = shares.concat();
        assert!(all.iter().all(|item| alone.contains(item)) && all.len() == alone.len());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), alone.len());
        let work = |share: &Vec<usize>| share.iter().map(|item| 1 + item % 7).sum::<usize>();
        let (least, most) = (shares.iter().map(work).min().unwrap(), shares.iter().map(work).max().unwrap());
        assert!(most - least < 50, "{least} {most}");
        assert_eq!(shares.iter().filter(|share| share.iter().any(|item| *item < 10)).count(), 1);
    }

    #[test]
    fn no_item_is_assigned_if_none_is_open() {
        assert!(assign_to_rank(&Solo, &[0, 1], &[1, 1], &[0, 1], |_| false).is_empty());
    }
}
