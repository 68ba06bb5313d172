//! Prefix tree of token sequences, whose nodes are computed once.

use candlewick_model::LengthClass;

/// Prefix tree of a set of sequences. Its shape depends on the set alone.
pub struct PrefixTree {
    /// Nodes in depth-first order.
    pub nodes: Vec<PrefixNode>,
    /// Node at which each sequence ends; `None` for an empty sequence.
    ends: Vec<Option<usize>>,
    /// Sequence indices in depth-first order of their ends.
    pub order: Vec<usize>,
}

/// A node: tokens that some sequences share after a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixNode {
    /// Parent node; `None` at the root.
    pub parent: Option<usize>,
    /// Index of a sequence that contains these tokens.
    pub sequence: usize,
    /// Start of the tokens in the sequence.
    pub start: usize,
    /// End of the tokens in the sequence.
    pub end: usize,
}

/// Minimum length of a shared node: gathering keys of a path costs as much as a few tokens.
const MIN_SHARED: usize = 8;

/// Sequences in lexicographic order that share their first `start` tokens and are longer.
struct Group {
    sequences: std::ops::Range<usize>,
    parent: Option<usize>,
    start: usize,
}

impl PrefixTree {
    /// Builds the tree. Sequences of one class share nodes; equal ones end at one node.
    pub fn new(sequences: &[&[u32]], classes: &[LengthClass]) -> Self {
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|i| (!sequences[*i].is_empty(), classes[*i], sequences[*i]));
        let mut end = order.partition_point(|i| sequences[*i].is_empty());
        let of_one_class = order[end..].chunk_by(|a, b| classes[*a] == classes[*b]);
        let group = |members: &[usize]| {
            end += members.len();
            Group { sequences: end - members.len()..end, parent: None, start: 0 }
        };
        let mut groups: Vec<Group> = of_one_class.map(group).collect();
        groups.reverse();
        let mut tree = Self { nodes: Vec::new(), ends: vec![None; sequences.len()], order };
        while let Some(group) = groups.pop() {
            if !group.sequences.is_empty() {
                groups.extend(tree.split(group, sequences).into_iter().rev());
            }
        }
        tree
    }

    /// Adds the node that a group shares, if it is long enough, and returns the groups that diverge after it.
    fn split(&mut self, group: Group, sequences: &[&[u32]]) -> Vec<Group> {
        let Group { sequences: mut range, mut parent, mut start } = group;
        let members = &self.order[range.clone()];
        let shared = common(sequences[members[0]], sequences[members[members.len() - 1]]);
        // Shorter sequences sort first.
        let n_ended = members.iter().take_while(|i| sequences[**i].len() == shared).count();
        if n_ended == members.len() || shared - start >= MIN_SHARED {
            let node = self.nodes.len();
            self.nodes.push(PrefixNode { parent, sequence: members[0], start, end: shared });
            members[..n_ended].iter().for_each(|i| self.ends[*i] = Some(node));
            (parent, start) = (Some(node), shared);
            range.start += n_ended;
        }
        let next_token = |i: &usize| sequences[*i].get(shared);
        let alike = self.order[range.clone()].chunk_by(|a, b| next_token(a) == next_token(b));
        let mut first = range.start;
        alike
            .map(|members| {
                first += members.len();
                Group { sequences: first - members.len()..first, parent, start }
            })
            .collect()
    }

    /// Returns the nodes of a sequence, from the root.
    pub fn path(&self, sequence: usize) -> Vec<usize> {
        self.path_to(self.ends[sequence])
    }

    fn path_to(&self, node: Option<usize>) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(node, |node| self.nodes[*node].parent).collect();
        path.reverse();
        path
    }
}

/// Returns the length of the common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints the nodes of a tree: tokens of the parents, then of the node.
    fn shown(sequences: &[&[u32]]) -> Vec<String> {
        shown_with(sequences, &vec![LengthClass::Short; sequences.len()])
    }

    fn shown_with(sequences: &[&[u32]], classes: &[LengthClass]) -> Vec<String> {
        let tree = PrefixTree::new(sequences, classes);
        let piece = |node: &usize| {
            let PrefixNode { sequence, start, end, .. } = tree.nodes[*node];
            format!("{:?}", &sequences[sequence][start..end])
        };
        (0..tree.nodes.len())
            .map(|node| tree.path_to(Some(node)).iter().map(piece).collect::<Vec<_>>().join(" "))
            .collect()
    }

    const LONG: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    fn after(beginning: &[u32], end: &[u32]) -> Vec<u32> {
        [beginning, end].concat()
    }

    #[test]
    fn a_long_enough_shared_prefix_is_a_node() {
        let (a, b) = (after(&LONG, &[20, 21]), after(&LONG, &[10]));
        assert_eq!(
            shown(&[&a, &b]),
            ["[1, 2, 3, 4, 5, 6, 7, 8]", "[1, 2, 3, 4, 5, 6, 7, 8] [10]", "[1, 2, 3, 4, 5, 6, 7, 8] [20, 21]"]
        );
        assert_eq!(shown(&[&a[1..], &b[1..]]), ["[2, 3, 4, 5, 6, 7, 8, 10]", "[2, 3, 4, 5, 6, 7, 8, 20, 21]"]);
        assert_eq!(shown(&[]), [""; 0]);
    }

    #[test]
    fn sequences_of_different_classes_share_no_node() {
        let (a, b) = (after(&LONG, &[20, 21]), after(&LONG, &[10]));
        let [short, long] = [LengthClass::Short, LengthClass::Long];
        assert_eq!(
            shown_with(&[&a, &b, &[]], &[short, long, long]),
            ["[1, 2, 3, 4, 5, 6, 7, 8, 20, 21]", "[1, 2, 3, 4, 5, 6, 7, 8, 10]"]
        );
    }

    #[test]
    fn an_empty_sequence_has_no_nodes() {
        let tree = PrefixTree::new(&[&LONG, &[], &[]], &[LengthClass::Short; 3]);
        assert_eq!((tree.path(0), tree.path(1), tree.order), (vec![0], vec![], vec![1, 2, 0]));
    }

    #[test]
    fn equal_sequences_and_beginnings_of_others_end_within() {
        let (a, b) = (after(&LONG, &[9]), after(&LONG, &[9, 10]));
        let sequences: [&[u32]; 6] = [&b, &LONG, &a, &b, &LONG[..2], &LONG];
        let tree = PrefixTree::new(&sequences, &[LengthClass::Short; 6]);
        for (i, sequence) in sequences.iter().enumerate() {
            let path = tree.path(i);
            let tokens: Vec<u32> = path
                .iter()
                .flat_map(|node| {
                    let PrefixNode { sequence, start, end, .. } = tree.nodes[*node];
                    sequences[sequence][start..end].to_vec()
                })
                .collect();
            assert_eq!(tokens, *sequence);
        }
        assert_eq!((tree.ends[0], tree.ends[1]), (tree.ends[3], tree.ends[5]));
        assert_eq!(tree.order, [4, 1, 5, 2, 0, 3]);
    }

    /// Sequences of few different tokens, so that they share much.
    fn random(n: usize, seed: u64) -> Vec<Vec<u32>> {
        let mut state = seed;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut all: Vec<Vec<u32>> = Vec::new();
        for _ in 0..n {
            let mut ids = match all.is_empty() || next(3) == 0 {
                true => Vec::new(),
                false => {
                    let other = &all[next(all.len() as u64) as usize];
                    other[..next(other.len() as u64 + 1) as usize].to_vec()
                }
            };
            ids.extend((0..=next(30)).map(|_| next(2) as u32));
            all.push(ids);
        }
        all
    }

    #[test]
    fn trees_spell_their_sequences_in_preorder() {
        for seed in 0..200 {
            let sequences = random(1 + seed as usize % 40, seed);
            let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
            let class = |i: usize| if i.is_multiple_of(3) { LengthClass::Long } else { LengthClass::Short };
            let classes: Vec<LengthClass> = (0..sequences.len()).map(class).collect();
            let tree = PrefixTree::new(&sequences, &classes);
            for (i, node) in tree.nodes.iter().enumerate() {
                assert!(node.start < node.end && node.parent.is_none_or(|parent| parent < i), "{seed}");
                assert_eq!(node.start, node.parent.map_or(0, |parent| tree.nodes[parent].end), "{seed}");
                // The descendants of a node follow it without a gap.
                let on_path = |other: usize| tree.path_to(Some(other)).contains(&i);
                let last = (i..tree.nodes.len()).rev().find(|other| on_path(*other)).unwrap_or(i);
                assert!((i..=last).all(on_path), "{seed}");
            }
            for (i, sequence) in sequences.iter().enumerate() {
                let path = tree.path(i);
                assert_eq!(path.last().map(|node| tree.nodes[*node].end), Some(sequence.len()), "{seed}");
                assert!(path.iter().all(|node| {
                    let PrefixNode { sequence: other, start, end, .. } = tree.nodes[*node];
                    classes[other] == classes[i] && sequences[other][start..end] == sequence[start..end]
                }));
            }
            assert!(tree.order.windows(2).all(|pair| tree.ends[pair[0]] <= tree.ends[pair[1]]), "{seed}");
        }
    }
}
