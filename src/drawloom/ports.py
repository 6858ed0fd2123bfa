"""
The ports (interfaces between components) and the plain data that components exchange.

A name imported as itself is public for type checkers.
"""

from drawloom.components.ports.adapters import (
    AdaptedLayer as AdaptedLayer,
    Adapter as Adapter,
    Fill as Fill,
    LowRank as LowRank,
    ThawingAdapter as ThawingAdapter,
    thaws_weights as thaws_weights,
)
from drawloom.components.ports.cache import (
    KeyValueCache as KeyValueCache,
)
from drawloom.components.ports.corpus import (
    ChatTokenizer as ChatTokenizer,
    Corpus as Corpus,
    DocumentPart as DocumentPart,
    KnownDocuments as KnownDocuments,
    Split as Split,
    TokenCorpus as TokenCorpus,
    TokenDocuments as TokenDocuments,
    Tokenizer as Tokenizer,
)
from drawloom.components.ports.data import (
    Collator as Collator,
    Example as Example,
    Examples as Examples,
    IGNORE_INDEX as IGNORE_INDEX,
    MAX_LENGTH as MAX_LENGTH,
    MeasuredRows as MeasuredRows,
    MovableData as MovableData,
    PackedDataset as PackedDataset,
    PairedDocuments as PairedDocuments,
    RowOrder as RowOrder,
    RowSource as RowSource,
    ReadsLeaves as ReadsLeaves,
    SourceProgress as SourceProgress,
    TokenBatch as TokenBatch,
    RowsOfTokens as RowsOfTokens,
    TracedRows as TracedRows,
    TrainingData as TrainingData,
    UnpairedAnswers as UnpairedAnswers,
    ValidationData as ValidationData,
    WritesBatches as WritesBatches,
    batch_types as batch_types,
    has_pairs as has_pairs,
    is_unpaired as is_unpaired,
    target_bytes as target_bytes,
    token_batch as token_batch,
)
from drawloom.components.ports.distributed import (
    LinearFormat as LinearFormat,
    DIMENSIONS as DIMENSIONS,
    Device as Device,
    Group as Group,
    Mesh as Mesh,
    Neighbours as Neighbours,
    P2PChannel as P2PChannel,
    Pending as Pending,
    Precision as Precision,
    Processes as Processes,
    Reduce as Reduce,
    PerDimension as PerDimension,
    SymmetricMemory as SymmetricMemory,
    Timed as Timed,
)
from drawloom.components.ports.experts import (
    Dispatched as Dispatched,
    Dispatcher as Dispatcher,
    ExpertKernels as ExpertKernels,
    ExpertParallelDispatcher as ExpertParallelDispatcher,
    ExpertRouter as ExpertRouter,
    ObserveRouting as ObserveRouting,
    PeerExchange as PeerExchange,
    Peers as Peers,
    routers_of as routers_of,
    supports_expert_parallel as supports_expert_parallel,
)
from drawloom.components.ports.flops import (
    CountsFlops as CountsFlops,
    ForwardFlops as ForwardFlops,
    UpdateFlops as UpdateFlops,
    count_attended_pairs as count_attended_pairs,
)
from drawloom.components.ports.log_records import (
    PRINTED as PRINTED,
    STEP_LINE as STEP_LINE,
    is_marked as is_marked,
)
from drawloom.components.ports.memory import (
    MEMORY_KINDS as MEMORY_KINDS,
    MemoryKind as MemoryKind,
    MemoryUser as MemoryUser,
    memory_by_kind as memory_by_kind,
)
from drawloom.components.ports.model import (
    LinearLayer as LinearLayer,
    known_module as known_module,
    BatchContext as BatchContext,
    BufferOwner as BufferOwner,
    ContextParallelModel as ContextParallelModel,
    ExpertModel as ExpertModel,
    Finish as Finish,
    Head as Head,
    HeadLayer as HeadLayer,
    HiddenStates as HiddenStates,
    Kernels as Kernels,
    LanguageModel as LanguageModel,
    KnownModule as KnownModule,
    LayerRange as LayerRange,
    Model as Model,
    PretrainedModel as PretrainedModel,
    RowPart as RowPart,
    TokenContext as TokenContext,
    ShapeKeepingModel as ShapeKeepingModel,
    TensorParallelModel as TensorParallelModel,
    VocabularyPart as VocabularyPart,
    layers_keep_shapes as layers_keep_shapes,
)
from drawloom.components.ports.parameter_roles import (
    BIAS_ROLE as BIAS_ROLE,
    MATRIX_ROLE as MATRIX_ROLE,
    RESIDUAL_ROLE as RESIDUAL_ROLE,
    SCALE_ROLE as SCALE_ROLE,
    TABLE_ROLE as TABLE_ROLE,
    DeclaresRoles as DeclaresRoles,
    Initial as Initial,
    Role as Role,
    default_role as default_role,
    parameter_roles as parameter_roles,
)
from drawloom.components.ports.pipeline import (
    Executor as Executor,
    MeasuresStep as MeasuresStep,
    Scorer as Scorer,
    ForwardPasses as ForwardPasses,
    LOSSES as LOSSES,
    LayersOnlySchedule as LayersOnlySchedule,
    Loss as Loss,
    OuterLayersSchedule as OuterLayersSchedule,
    PartialSchedule as PartialSchedule,
    PartitioningSchedule as PartitioningSchedule,
    Predictor as Predictor,
    RecomputingSchedule as RecomputingSchedule,
    Referenced as Referenced,
    STEP_SPECS as STEP_SPECS,
    Schedule as Schedule,
    TrainableLoss as TrainableLoss,
    chooses_recompute as chooses_recompute,
    embeds_on_every_rank as embeds_on_every_rank,
    module_of as module_of,
    state_of_batches as state_of_batches,
    sum_losses as sum_losses,
)
from drawloom.components.ports.program import (
    Action as Action,
    MessageOp as MessageOp,
    OPS as OPS,
    Op as Op,
    Overlap as Overlap,
    Program as Program,
    RankProgram as RankProgram,
    ShardOp as ShardOp,
    flat as flat,
    group_overlaps as group_overlaps,
)
from drawloom.components.ports.recurrence import (
    RecurrentKernels as RecurrentKernels,
)
from drawloom.components.ports.rollouts import (
    Answer as Answer,
    Completions as Completions,
    MakesRows as MakesRows,
    PolicyBatch as PolicyBatch,
    PromptBatch as PromptBatch,
    Prompts as Prompts,
    ROLLOUTS as ROLLOUTS,
    Reward as Reward,
    Rollouts as Rollouts,
    Scored as Scored,
)
from drawloom.components.ports.run import (
    Accumulator as Accumulator,
    AfterRestore as AfterRestore,
    Batching as Batching,
    Cadence as Cadence,
    Durable as Durable,
    Event as Event,
    EventKind as EventKind,
    Events as Events,
    FILES as FILES,
    FinalTask as FinalTask,
    GrowingState as GrowingState,
    KnownSteps as KnownSteps,
    Listener as Listener,
    LocalState as LocalState,
    METRIC_TOTALS as METRIC_TOTALS,
    Metric as Metric,
    NamesNumbers as NamesNumbers,
    Phase as Phase,
    PlannedPhase as PlannedPhase,
    Randomness as Randomness,
    ReadsFiles as ReadsFiles,
    Restorer as Restorer,
    RunFolder as RunFolder,
    RunInfo as RunInfo,
    SavingPhase as SavingPhase,
    SelectiveListener as SelectiveListener,
    SlicedState as SlicedState,
    Stateful as Stateful,
    Step as Step,
    Stop as Stop,
    StoppedError as StoppedError,
    StoppingPhase as StoppingPhase,
    Tracker as Tracker,
    Value as Value,
    check_cadence as check_cadence,
    due as due,
    event_kinds as event_kinds,
)
from drawloom.components.ports.slices import (
    ModelParameter as ModelParameter,
    RankSlice as RankSlice,
    SlicedTensor as SlicedTensor,
    TensorSlice as TensorSlice,
    gather_shares as gather_shares,
    is_dtensor as is_dtensor,
    rank_shares as rank_shares,
)
from drawloom.components.ports.stages import (
    AveragedWeights as AveragedWeights,
    FusedBackward as FusedBackward,
    IN_PARAMETERS as IN_PARAMETERS,
    LOSS as LOSS,
    Parameters as Parameters,
    Recompute as Recompute,
    ReducedPart as ReducedPart,
    Shards as Shards,
    SpreadParameters as SpreadParameters,
    Stage as Stage,
    StageInputs as StageInputs,
    Stages as Stages,
    TrainableStages as TrainableStages,
    Transform as Transform,
    fuses_backward as fuses_backward,
    gradient_of as gradient_of,
    with_averages as with_averages,
)
from drawloom.components.ports.staging import (
    Stager as Stager,
)
from drawloom.components.ports.teacher import (
    TeacherPredictions as TeacherPredictions,
)
from drawloom.components.ports.tracking import (
    Context as Context,
    ContextTracker as ContextTracker,
    DistributionMetric as DistributionMetric,
    DistributionTracker as DistributionTracker,
    Histogram as Histogram,
    PropertyTracker as PropertyTracker,
    by_context as by_context,
    flat_properties as flat_properties,
)
from drawloom.components.ports.weights import (
    Convert as Convert,
    Mapper as Mapper,
    TensorGroup as TensorGroup,
)
from drawloom.components.state.batch import (
    Batch as Batch,
    LeafSpec as LeafSpec,
    leaf as leaf,
)
from drawloom.components.state.specs import (
    Replicate as Replicate,
    Shard as Shard,
    SpecTree as SpecTree,
    Stack as Stack,
)
from drawloom.components.state.step_state import (
    MissingStateError as MissingStateError,
    PipelineStateError as PipelineStateError,
    StateView as StateView,
    StepState as StepState,
)
from drawloom.kernels.attention_options import (
    AttentionOptions as AttentionOptions,
    PLAIN_ATTENTION as PLAIN_ATTENTION,
)

__all__ = [name for name in dir() if name[0].isalpha()]
