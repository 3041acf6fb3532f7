"""The keywords of `fedstill.run`, for editors and type checkers. tools/keywords.py writes this file."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from fedstill.building.sections import ColumnSettings, GroupSettings, RegionSettings
from fedstill.core.choices import AttackKind, BufferPolicy, Precision


class Settings(TypedDict, total=False):
    """Every setting of a run (`fedstill settings`)."""

    target: str
    """Of a table: the column with the label."""
    client_column: str
    """Column that names the client of each row."""
    split_column: str
    """Of a table: the column that says "train" or "test"; empty: a fifth tests."""
    categorical_columns: list[str]
    """Of a table: columns of whole numbers that stand for categories."""
    drop_columns: list[str]
    """Of a table: columns to leave out."""
    columns: list[ColumnSettings] | list[dict[str, Any]]
    """Of a table: what its columns are, as 'fedstill columns' writes it."""
    classes: list[str]
    """Of a table: its classes; none: the labels that occur."""
    data_dir: str
    """Where dataset files are; empty: $FEDSTILL_DATA."""
    image_size: int
    """Resize images to this; 0: as the model needs, else as they are. [default: 0; at least 0]"""
    text_column: str
    """Column of the texts of a .csv, .tsv or .jsonl; empty: text."""
    label_column: str
    """Column of their labels; empty: label."""
    tokenizer: str
    """Of text: a file, folder or hub name, or public text to train one on; empty: the pretrained encoder's own,
    else trained on the training texts."""
    vocabulary: int
    """Tokens of a tokenizer that is trained, at most. [default: 8000; at least 259]"""
    max_length: int
    """Tokens that a text is cut to. [default: 128; at least 3]"""
    fraction: float
    """Share of the training data used, of each class. [default: 1.0; above 0, at most 1]"""
    imbalance_factor: float
    """Long tail: largest class over smallest; 1: as it is. [default: 1.0; at least 1]"""
    pool: float
    """Samples the server holds: a count, or a share if below 1. [default: 0.0; at least 0]"""
    proxy_size: int
    """Proxy samples, balanced over the classes of their own dataset; at most all. [default: 1000; at least 1]"""
    partition: str
    """How the data are divided among clients: dirichlet, iid, natural, shards, n_way, quantity, dir_balanced,
    dir_feddf, dir_fedkf, dir_fedgen or dir_client_prior; default for data that name their clients: natural.
    [default: dirichlet]"""
    clients: int
    """Number of clients; 0: as many as the data name; default with natural: 0. [default: 20; at least 0]"""
    alpha: float
    """Dirichlet concentration: 100 is nearly even, 0.1 is very heterogeneous. [default: 0.1; above 0]"""
    min_size: int
    """Fewest samples a client may get; -1: the partition's own. [default: -1; at least -1]"""
    shards_per_client: int
    """Shards, of about one class each, that a client gets (shards). [default: 2; at least 1]"""
    ways: int
    """Classes that a client has, about (n_way). [default: 3; at least 1]"""
    shots: int
    """Samples that it has of each, about (n_way). [default: 100; at least 1]"""
    ways_spread: int
    """How far a client's classes and samples may lie from these (n_way). [default: 2; at least 0]"""
    size_sigma: float
    """Log-normal spread of the clients' sizes (dir_client_prior). [default: 0.0; at least 0]"""
    min_share: float
    """Smallest share of a mean client's size (dir_feddf). [default: 0.5; at least 0, below 1]"""
    ratio: float
    """Share of the data used (dir_fedgen). [default: 0.5; above 0, at most 1]"""
    samples_per_client: int
    """Samples a client keeps at most; 0: all. [default: 0; at least 0]"""
    test_fraction: float
    """Share of a client's data held out for its own test. [default: 0.2; at least 0, below 1]"""
    local_test: Literal["split", "matched", "shared", "own"]
    """A client's test data: split from its own, drawn from the test set in the same proportions, 1/clients of the
    test samples of each class it has, or those of the test set that the data say are its own. [default: split;
    split, matched, shared, own]"""
    validation: float
    """Share of each client's training samples, and of the server's, held out to choose by; every evaluation then
    has val_accuracy, val_amp, val_wlp and so on. [default: 0.0; at least 0, below 1]"""
    model_options: dict[str, Any]
    """Options of the network; feature_size gives any network penultimate features of that size."""
    group: list[GroupSettings] | list[dict[str, Any]]
    """Instead of models: which clients have which network."""
    augment: str
    """Random changes of training images, e.g. "crop,flip" or "flip,rotate:15,scale:0.8-1.0"."""
    buffers: BufferPolicy
    """BatchNorm statistics: average them, keep them local, or drop them. [default: average; average, local, drop]"""
    rounds: int
    """Communication rounds. [default: 30; at least 1]"""
    participation: float
    """Share of the clients that are active in a round. [default: 0.2; above 0, at most 1]"""
    epochs: int
    """Local epochs a round. [default: 5; at least 1]"""
    local_unit: Literal["epochs", "equal_steps"]
    """An epoch is a pass over the client's data, or the same number of steps for all. [default: epochs; epochs,
    equal_steps]"""
    batch_size: int
    """Local batch size. [default: 32; at least 1]"""
    optimizer: Literal["sgd", "adam"]
    """Local optimiser; default on text, if lr is not set: adam. [default: sgd; sgd, adam]"""
    lr: float
    """Local learning rate; default, if optimizer is not set, on text: 0.001, on tables: 0.1. [default: 0.05; above
    0]"""
    lr_decay: float
    """Factor on lr after each round. [default: 1.0; above 0, at most 1]"""
    momentum: float
    """Local momentum (sgd). [default: 0.0; at least 0, below 1]"""
    weight_decay: float
    """Local weight decay. [default: 0.0; at least 0]"""
    decay_norms: bool
    """Weight decay also of normalisation layers. [default: True]"""
    clip: float
    """Largest gradient norm; 0: no clipping. [default: 0.0; at least 0]"""
    class_weight: str | dict[str, float]
    """How much a sample of each class counts in the clients' loss: balanced, inversely to how many all clients
    have; or a number for each class, {no = 1, yes = 70}."""
    precision: Precision
    """Number format of passes through the network; weights stay in float32. [default: float32; float32, bfloat16]"""
    regions: int
    """Regions, each a federation of its own until the end of an episode; 1: none; default with f2l: 3. [default:
    1; at least 1]"""
    rounds_per_episode: int
    """Rounds after which the regions' models are merged. [default: 5; at least 1]"""
    fixed_regions: bool
    """Clients stay in their region; else they are dealt anew each episode. [default: True]"""
    region: list[RegionSettings] | list[dict[str, Any]]
    """What single regions have of their own."""
    save_teachers: bool
    """Keep the regions' models of each episode, for 'fedstill reteach'. [default: False]"""
    late_clients: int
    """Clients, the last ones, that are not there from the start. [default: 0; at least 0]"""
    late_from: int
    """First round of the late clients. [default: 1; at least 1]"""
    attack: AttackKind
    """What malicious clients do: to their labels, or to what they send. [none, label-flip, mirror-flip, noise,
    sign-flip, scale, count, buffers, extra, alie, ipm, min-max, adaptive]"""
    attackers: int
    """Number of malicious clients, drawn among those that have data. [default: 0; at least 0]"""
    attack_class: int
    """Class that malicious clients give to all their samples (label-flip). [default: 0; at least 0]"""
    attack_scale: float
    """Noise: its spread over each layer's own; scale: the factor on the update; sign-flip, count, ipm: minus that
    factor; alie: spreads from the honest mean; buffers, extra: the number that is sent. [default: 1.0; at least
    -1e+30, at most 1e+30]"""
    seed: int
    """The same seed gives the same bits. [default: 0; at least 0]"""
    engine: Literal["process", "inline", "ray"]
    """Where clients run: worker processes, inline in this one (to debug), or workers on a Ray cluster. [default:
    process; process, inline, ray]"""
    workers: int
    """Worker processes, and threads for a server's predictions; 0: one a core; not on a GPU. [default: 0; at least
    0]"""
    ray_address: str
    """Where the Ray cluster is, such as 10.0.0.1:6379, or auto for that of this machine; none: RAY_ADDRESS, else
    one is started on this machine."""
    worker_gpus: float
    """Ray: what each worker has of a GPU; 0.25: four share one; 0: they use the CPU. [default: 0.0; at least 0, at
    most 1]"""
    device: str
    """Where to compute: cpu, cuda, cuda:1 and so on, or auto (a GPU if there is one); on a GPU all work is done in
    this process. [default: cpu]"""
    together: int
    """Clients of equal size trained at once (vmap); for GPUs, on a CPU slower. [default: 1; at least 1]"""
    eval_every: int
    """Evaluate every so many rounds; 0: only after the last. [default: 1; at least 0]"""
    checkpoint_every: int
    """Rounds between checkpoints. [default: 1; at least 1]"""
    keep_checkpoints: int
    """Checkpoints kept, to which 'fedstill rollback' can go back. [default: 2; at least 2]"""
    save_models: int
    """Keep the global model every so many rounds; 0: none. [default: 0; at least 0]"""
    min_clients: int
    """Stop if fewer clients of a round (and region) give a usable answer. [default: 1; at least 1]"""
    round_retries: int
    """Served: how often a round without enough usable answers is tried again. [default: 5; at least 0]"""
    max_update_ratio: float
    """Served: an update longer than so many times the round's median is dropped; 0: none is. [default: 100.0; at
    least 0]"""
    secure_aggregation: bool
    """The server gets only the sum of a round's updates, all counting alike: of sites under masks that cancel in
    it, in a simulation with the same rounding. [default: False]"""
    max_share: float
    """Served: the largest share of all samples (and tests) that a site counts with; 0: 0.75 of three sites, 0.6 of
    four, half of more; 1: no limit. [default: 0.0; at least 0, at most 1]"""
    select: str
    """Keep the model of the round that is best by this number, such as val_amp: best.safetensors."""
    restore_best: bool
    """The run's model is that of the best round, by select. [default: False]"""
    patience: int
    """Stop after so many evaluations in which select did not improve; 0: never. [default: 0; at least 0]"""
    min_delta: float
    """Smallest change of select that is an improvement, to stop by. [default: 0.0; at least 0]"""
    target_accuracy: float
    """Accuracy whose first round is reported; 0: none. [default: 0.0; at least 0, at most 1]"""
    hyper: dict[str, Any]
    """The method's own settings."""


class MethodSettings(TypedDict, total=False):
    """The settings of the methods (`fedstill methods NAME`). Those of a method of your own go into `hyper`."""

    M: int
    """fedhyb: sub-networks a step."""
    T: float
    """fedhkd: temperature of the soft predictions; lkd: temperature of the distillation; mtkd: temperature of the
    distillation; f2l: temperature of the distillation."""
    T_end: float
    """fedkd: share of the energy that is sent at the end."""
    T_rounds: int
    """fedkd: rounds over which one becomes the other."""
    T_start: float
    """fedkd: share of the energy that is sent at first."""
    Tw: float
    """lkd: how sharply reliability counts; 0: all teachers alike; mtkd: always 0 here: all teachers alike; f2l:
    how sharply reliability counts; 0: all teachers alike."""
    a: float
    """fedhyb: weight of the self-distillation."""
    across: bool
    """fedgkd: where networks differ, the other groups' teachers teach too; fedgkd-plus: where networks differ, the
    other groups' teachers teach too; fedkf: where networks differ, the other groups' teachers teach too."""
    activation_mean: bool
    """fedkf: mean of the absolute features instead of their sum."""
    adaptive_clip: float
    """dp: share of the updates that the clip should leave as they are; 0: the clip stays."""
    adv_epochs: int
    """dafkd: and only in a round's first epochs; 0: in all."""
    adv_rounds: int
    """dafkd: train generator and discriminators only in the first rounds; 0: in all."""
    average_weights: bool
    """fedmd: also average the weights, so that there is a global model."""
    batches: int
    """dafkd: generated batches a round for the distillation."""
    beta: float
    """fedgkd-vote: temperature of the vote; 0: 1/buffer; fedkf: learning rate of the generator (Adam); fml: weight
    of the labels for the shared network; fedgen: weight of the generated features' predictions on clients."""
    beta_per_sample: bool
    """fedhyb: beta from each sample's loss, not the batch's mean."""
    buffer: int
    """fedgkd: M: how many past global models are averaged; fedgkd-vote: M: how many past global models teach;
    fedgkd-plus: M: how many past global models are averaged; moon: how many of its previous models a client
    keeps."""
    byzantine: int
    """krum: f, how many clients of a round may be malicious; multi-krum: f, how many clients of a round may be
    malicious; bulyan: f, how many clients of a round may be malicious."""
    c: float
    """feddistill: weight of the class logits; feddistill-plus: weight of the class logits."""
    cache_init: Literal["seen", "w0"]
    """fedkf: clients never active: left out (seen), or with the initial weights (w0); t1: clients never active:
    left out (seen), or with the initial weights (w0)."""
    calibration_batch: int
    """ccvr: batch size."""
    calibration_epochs: int
    """ccvr: epochs over them."""
    calibration_lr: float
    """ccvr: learning rate of the classifier (SGD)."""
    clients_teach: bool
    """fedbe: the clients' own models teach too."""
    conditional: bool
    """dafkd: the generator has a label as a further input, drawn at random."""
    dcgan_init: bool
    """dafkd: the generator's first weights have deviation 0.02, as in DCGAN."""
    decay: float
    """fedgen: factor on both weights, and on the generator's rate, after each round."""
    delta: float
    """dp: how likely the promise may fail; 0: 0.1 / clients; dp-sgd: how likely the promise may fail; below 1 /
    samples of a client; votes: how likely the promise may fail; 0: 0.1 / clients."""
    digest: Literal["joint", "first"]
    """fedmd: learn the consensus beside the private data, or before them."""
    distribution: Literal["gaussian", "dirichlet"]
    """fedbe: of the updates, or of the clients' shares."""
    down: Literal["none", "bfloat16", "int8"]
    """compress: models that the server sends."""
    draw_size: int
    """creff: samples in each."""
    draws: int
    """creff: batches that a class's gradient is the mean of."""
    epsilon: float
    """fedmgda-plus: how far the weights may leave n_k/n; f2l: the disagreement from which LKD is used."""
    eta: float
    """fedmgda-plus: length of the server's step: updates are normalised to length 1; fedhyb: weight of the
    predictions on the server."""
    features: int
    """creff: synthetic features of each class."""
    gamma: float
    """fedgkd: weight of the teacher; the loss has gamma/2; fedgkd-plus: weight of the teacher; the loss has
    gamma/2; fedkf: weight of the teacher, Eq. 7; fedhkd: weight of the features."""
    gen_adversarial: bool
    """fedkf: the generator also seeks samples on which the student differs from the teacher."""
    gen_first: bool
    """fedkf: generator step before the student's, as in Algorithm 1."""
    generator_batch: int
    """fedgen: batch size of the generator, and of what clients generate."""
    generator_beta1: float
    """dafkd: decay of its Adam's mean of gradients; DCGAN: 0.5."""
    generator_beta2: float
    """dafkd: decay of its Adam's mean of squared gradients."""
    generator_decay: float
    """fedgen: weight decay of the generator."""
    generator_lr: float
    """dafkd: learning rate of the generator (Adam); fedgen: learning rate of the generator (Adam); fedftg:
    learning rate of the generator (Adam)."""
    generator_steps: int
    """fedgen: steps of the generator a round."""
    generator_width: int
    """dafkd: most channels of its layers; 0: 256, of the conditional one 128; fedftg: channels of the generator;
    the paper's presets: 128."""
    hidden: int
    """fedgen: width of the generator."""
    ie_normalised: bool
    """fedkf: information entropy divided by log C and shifted into 0..1."""
    iterations: int
    """fedftg: turns of generator and student a round; geomed: Weiszfeld steps; centered-clip: clipping steps a
    round."""
    keep: int
    """multi-krum: how many clients count, if there are so many; 0: all but `byzantine`."""
    labelled_frac: float
    """lkd: share of it whose labels may be used; mtkd: share of it whose labels may be used; f2l: share of it
    whose labels may be used."""
    lambda1: float
    """fedkf: weight of the generator's cross-entropy, Eq. 4."""
    lambda2: float
    """fedkf: weight of the generator's activation loss, Eq. 4."""
    lambda3: float
    """lkd: weight of the labels; the teachers' follow from it; mtkd: weight of the labels; the teachers' follow
    from it; f2l: weight of the labels; the teachers' follow from it."""
    lambda_cls: float
    """fedftg: weight of the generator's cross-entropy."""
    lambda_dis: float
    """fedftg: weight of its diversity."""
    literal: bool
    """fedhyb: Eq. 3 and 5 as printed, (sum_m beta_m) (sum_m KL_m), not sum_m beta_m KL_m."""
    logit_T: float
    """dafkd: average logits, matched at this temperature; 0: probabilities (Eq. 8)."""
    match_lr: float
    """creff: learning rate of the features (SGD)."""
    match_steps: int
    """creff: steps of matching gradients a round."""
    max_norm: float
    """norm-clip: largest norm of a client's update; 0: the median of the round's."""
    min_width: float
    """fedhyb: smallest width of a sub-network; one always has it."""
    mu: float
    """fedprox: weight of the proximal term; moon: weight of the contrast."""
    noise: float
    """fedhkd: standard deviation of the noise that clients add to mean features."""
    noise_multiplier: float
    """dp: standard deviation of the noise on the sum, in clips; 0: found from target_epsilon, or 1; dp-sgd:
    standard deviation of the noise on a step's sum, in clips; votes: standard deviation of the noise on the
    sum, in clips; 0: found from target_epsilon, or 1."""
    noise_shares: int
    """dp: with secure_aggregation: clients whose noise together is the noise; 0: the server adds it."""
    nu: float
    """fedhyb: weight of the features on the server; geomed: smallest distance that is divided by."""
    penalty: float
    """dafkd: weight of the gradient penalty, (|grad D(x)| - 1)^2 of each sample."""
    pool_choice: Literal["proportional", "balanced"]
    """lkd: classes of that share: as in the pool, or even; mtkd: classes of that share: as in the pool, or even;
    f2l: classes of that share: as in the pool, or even."""
    private: bool
    """dafkd: clients send weighted predictions, not their discriminators, which these still give away."""
    q: float
    """qffl: how much a larger loss counts; 0: uniform average."""
    queries: int
    """votes: proxy samples that are voted on in a round; fewer have less noise."""
    reduce: Literal["max", "mean", "l2"]
    """f2l: how the classes' disagreements become one number."""
    regulariser: Literal["kl", "mse"]
    """fedgkd: KL of probabilities, or squared error of logits; fedgkd-vote: KL of probabilities, or squared error
    of logits; fedgkd-plus: KL of probabilities, or squared error of logits."""
    reset_generator: bool
    """fedkf: a new generator every round, as in Algorithm 1."""
    retrain_batch: int
    """creff: its batch size."""
    retrain_epochs: int
    """creff: epochs of training a new classifier on them."""
    retrain_lr: float
    """creff: its learning rate (SGD)."""
    rotation: float
    """fedhyb: largest rotation of a sub-network's images, in degrees."""
    samples: int
    """fedbe: models drawn; 0 with clients_teach is plain ensemble distillation."""
    sampling: Literal["poisson", "fixed"]
    """dp: each client is drawn by chance, or a fixed number of them (needs more noise); votes: each client is
    drawn by chance, or a fixed number of them (needs more noise)."""
    scales: str
    """dp: length of parts beside an update of norm 1, as in 'logits=10 known=3'."""
    server_batch: int
    """fedtgp: batch size of their training; feddf: batch size of the distillation; dafkd: B: samples in each, and
    the batch size of the distillation; fedhyb: batch size of the distillation; fedftg: generated samples a
    step; fedbe: batch size of the distillation; lkd: batch size of the distillation; mtkd: batch size of the
    distillation; f2l: batch size of the distillation; votes: batch size of it."""
    server_epochs: int
    """fedtgp: epochs over the clients' prototypes a round; dafkd: epochs of the distillation; fedhyb: epochs over
    the server's samples a round; fedbe: epochs over the proxy data a round; lkd: epochs of the distillation;
    mtkd: epochs of the distillation; f2l: epochs of the distillation; votes: passes over them that the model
    learns."""
    server_frac: float
    """lkd: share of the server's pool that is used; mtkd: share of the server's pool that is used; f2l: share of
    the server's pool that is used."""
    server_lr: float
    """fedtgp: learning rate of the prototypes (SGD); scaffold: how far the server goes towards the clients' mean;
    feddf: learning rate (Adam, falling along a cosine); dafkd: learning rate of the distillation (Adam);
    fedhyb: learning rate of the distillation (Adam); fedftg: learning rate of the student (SGD); fedbe:
    learning rate (SGD, momentum 0.9); lkd: learning rate of the distillation (Adam); mtkd: learning rate of the
    distillation (Adam); f2l: learning rate of the distillation (Adam); votes: learning rate of it (Adam)."""
    server_steps: int
    """feddf: distillation steps a round."""
    share: float
    """compress: of topk: the share of the weights whose change is sent."""
    shared: str
    """fml: the network that is shared: a name, as of model; fedkd: the network that is shared: a name, as of
    model."""
    sharpen: float
    """fedbe: temperature of the ensemble's probabilities; below 1 sharpens."""
    source: Literal["proxy", "generated"]
    """fedhyb: server samples; generated needs dafkd+fedhyb."""
    spread: float
    """fedbe: factor on the Gaussian's standard deviation."""
    student_init: Literal["avg", "old"]
    """lkd: start from the average, or from the old global model; mtkd: start from the average, or from the old
    global model; f2l: start from the average, or from the old global model."""
    student_steps: int
    """fedftg: steps of the student in each."""
    t1: bool
    """fedkf: teach and return the all-clients average; False is FedKF-."""
    target_epsilon: float
    """dp: most that may be spent; the run ends before it would be more; dp-sgd: most that any client may spend;
    the run ends before; 0: no end; votes: most that may be spent; the run ends before it would be more."""
    tau: float
    """moon: temperature of the contrast; fedtgp: largest margin; centered-clip: radius around the centre; 0: the
    median of the clients' distances from it."""
    trim: float
    """trimmed-mean: share of the clients cut off at each end; 0: the plain, uniform mean."""
    uniform: bool
    """feddf: average the clients' weights uniformly, not by sample counts; dafkd: average classifiers and
    generators uniformly (Eq. 4, 6), not by sample counts; fedhyb: average the clients' weights uniformly, not
    by sample counts; fedgen: average the clients' weights uniformly, not by sample counts; fedftg: average the
    clients' weights uniformly, not by sample counts; fedbe: average the clients' weights uniformly, not by
    sample counts; creff: average the clients' weights uniformly, not by sample counts; lkd: average the
    clients' weights uniformly, not by sample counts; mtkd: average the clients' weights uniformly, not by
    sample counts; f2l: average the clients' weights uniformly, not by sample counts."""
    up: Literal["none", "bfloat16", "int8", "topk"]
    """compress: clients' updates: int8 or topk with error feedback, bfloat16 without, or none."""
    update: bool
    """lkd: the old global model teaches too (Eq. 4); mtkd: the old global model teaches too (Eq. 4); f2l: the old
    global model teaches too (Eq. 4)."""
    val_split: float
    """lkd: share of the labelled kept for reliability alone; 0: all serve both; mtkd: share of the labelled kept
    for reliability alone; 0: all serve both; f2l: share of the labelled kept for reliability alone; 0: all
    serve both."""
    variant: Literal["full", "no-sharing", "no-correlation", "no-distill"] | Literal["full", "1", "2", "3"]
    """dafkd: full, or an ablation: no-sharing (of the trunk), no-correlation, no-distill; fedhyb: ablation: 1
    (self-distillation, beta=1), 2 (with beta), 3 (server only), full."""
    virtual: int
    """ccvr: features drawn of each class."""
    weight: float
    """fedmd: of the consensus, with digest=joint."""
    width: int
    """fedkf: channels of the generator; the paper's: 128."""
    z_dim: int
    """fedkf: dimension of the noise; dafkd: d: dimension of the noise; fedgen: dimension of the noise; fedftg:
    dimension of the noise."""


class Keywords(Settings, MethodSettings, total=False):
    """Both."""
