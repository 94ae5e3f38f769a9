// dispatch/dispatch.h: the two types that Metal's declarations name.
#pragma once
typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;
