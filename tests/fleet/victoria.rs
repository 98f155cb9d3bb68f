//! The same of VictoriaMetrics in Prometheus's place: it knows no native histograms, and counts and looks back its own way.

use cmt_tests::Engine;

use crate::node::Form;
use crate::{breaks, check, sides, turn_of, two_nodes, worst_and_losses};

const ENGINE: Engine = Engine::VictoriaMetrics;

#[test]
fn counts_are_exact_and_quantiles_within_their_bucket() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    let (report, truth) = two_nodes(ENGINE, [Form::Classic; 2]);
    assert_eq!(report["histograms"], "classic");
    check(&report, &truth, 4.0);
}

#[test]
fn restarts_and_comings_and_goings_stay_exact() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    breaks(ENGINE, Form::Classic);
}

#[test]
fn the_worst_come_first_and_losses_are_told() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    worst_and_losses(ENGINE);
}

#[test]
fn a_rollout_is_compared_before_and_after() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    sides::rollout(ENGINE, Form::Classic);
}

#[test]
fn two_groups_of_nodes_are_compared() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    sides::groups(ENGINE);
}
