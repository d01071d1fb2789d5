"""Where values come from and go to: variables, tables, data, generators, other workers; and control flow."""

from autodist.graph.ops.row import Row, Trait, linear

ROWS = (
    Row("Const", Trait.SOURCE | Trait.EXACT),
    Row("Placeholder PlaceholderV2", Trait.SOURCE | Trait.FED),
    # A run of AutoDist feeds it; XLA would leave it out.
    Row("PlaceholderWithDefault", Trait.FED | Trait.NOT_IN_XLA, linear(0)),
    Row("NoOp", Trait.BY_SHAPES),
    Row("Assert", Trait.TELLS | Trait.NOT_IN_XLA),
    Row("PrintV2", Trait.TELLS),
    Row("Print", Trait.LOOKS),
    # Variables. Of rows of them a compiled function would take and give back the whole.
    Row("VarHandleOp", Trait.SOURCE),
    Row("ReadVariableOp", Trait.READ | Trait.BY_SHAPES),
    Row("ResourceGather", Trait.READ | Trait.NOT_IN_XLA),
    Row("ResourceGatherNd _ReadVariablesOp", Trait.READ),
    Row("AssignVariableOp AssignAddVariableOp AssignSubVariableOp", Trait.ASSIGNMENT),
    Row("ResourceStridedSliceAssign", Trait.NOT_IN_XLA),
    Row("VariableShape", Trait.QUERY | Trait.BY_SHAPES),
    Row("VarIsInitializedOp", Trait.QUERY | Trait.NOT_IN_XLA),
    Row("VariableV2 Variable TemporaryVariable", Trait.REFERENCE),
    # Tables and data.
    Row("HashTableV2 MutableHashTableV2 MutableHashTableOfTensorsV2 MutableDenseHashTableV2", Trait.TABLE),
    Row("LookupTableFindV2 LookupTableSizeV2", Trait.TABLE_READ),
    Row("LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2 InitializeTableV2", Trait.TABLE_WRITE),
    Row("InitializeTableFromTextFileV2 InitializeTableFromDataset", Trait.TABLE_WRITE),
    Row("Iterator IteratorV2 OneShotIterator", Trait.ITERATOR),
    Row("IteratorGetNext IteratorGetNextSync", Trait.ITERATOR_GET),
    Row("IteratorGetNextAsOptional QueueDequeue QueueDequeueV2 QueueDequeueMany", Trait.QUEUE_GET),
    Row("QueueDequeueManyV2 QueueDequeueUpTo QueueDequeueUpToV2", Trait.QUEUE_GET),
    # Chance.
    Row("RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal", Trait.SEEDED),
    Row("ParameterizedTruncatedNormal Multinomial RandomGamma RandomPoisson RandomPoissonV2", Trait.SEEDED),
    Row("RandomShuffle", Trait.SEEDED | Trait.SHUFFLES),
    Row("RandomShuffleQueue UniformCandidateSampler LogUniformCandidateSampler", Trait.SEEDED),
    Row("LearnedUnigramCandidateSampler AllCandidateSampler FixedUnigramCandidateSampler", Trait.SEEDED),
    Row("ThreadUnsafeUnigramCandidateSampler", Trait.SEEDED),
    Row("RngReadAndSkip RngSkip StatefulStandardNormalV2 StatefulTruncatedNormal", Trait.GENERATOR),
    Row("StatefulUniform StatefulUniformFullInt StatefulUniformInt", Trait.GENERATOR),
    Row("StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt", Trait.BY_KEY),
    Row("StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2", Trait.BY_KEY),
    Row("StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal", Trait.BY_KEY),
    Row("StatelessTruncatedNormalV2 StatelessParameterizedTruncatedNormal StatelessMultinomial", Trait.BY_KEY),
    Row("StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomPoisson", Trait.BY_KEY),
    Row("StatelessRandomBinomial", Trait.BY_KEY),
    Row("StatelessShuffle", Trait.BY_KEY | Trait.SHUFFLES),
    Row("StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomGetAlg", Trait.KEY),
    # Other workers.
    Row("CollectiveAssignGroupV2 CollectiveReduceV2 XlaAllReduce XlaRecv XlaReduceScatter XlaSend", Trait.NOT_IN_XLA),
    # Functions, and the branches and loops of TensorFlow 1.
    Row("PartitionedCall", Trait.CALL),
    Row("StatefulPartitionedCall", Trait.CALL | Trait.NOT_IN_XLA),
    Row("SymbolicGradient", Trait.NOT_IN_XLA),
    Row("If StatelessIf Case StatelessCase", Trait.BRANCH),
    Row("While StatelessWhile", Trait.LOOP),
    Row("Enter RefEnter", Trait.ENTER, linear(0)),
    Row("Switch RefSwitch", Trait.SWITCH, linear(0)),
    Row("Merge RefMerge", Trait.MERGE, linear()),
    Row("NextIteration RefNextIteration", Trait.BACK, linear(0)),
    Row("Exit RefExit", Trait.EXIT, linear(0)),
    Row("StackV2 Stack TensorArrayV3", Trait.STACK),
)
